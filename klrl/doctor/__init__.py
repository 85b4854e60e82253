"""``klrl doctor``: are this machine's KL numbers true, and is a loss's gradient?"""

from __future__ import annotations

from klrl.doctor.lines import KnownNumber


def examine() -> list[KnownNumber]:
    """The lines of ``klrl doctor``, in the order of its tables."""
    import torch

    from klrl.doctor import numbers, parity

    torch.set_num_threads(1)
    return [*numbers.number_lines(), *parity.parity_lines()]
