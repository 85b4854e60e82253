"""``klrl doctor``: checks the KL numbers that this machine computes, and the gradient of a loss."""

from __future__ import annotations

from klrl.doctor.lines import KnownNumber


def examine() -> list[KnownNumber]:
    """The lines of ``klrl doctor``, in the order of its tables."""
    import torch

    from klrl.doctor import numbers, parity

    torch.set_num_threads(1)
    return [*numbers.number_lines(), *parity.parity_lines()]
