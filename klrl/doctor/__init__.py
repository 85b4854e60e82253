"""``klrl doctor``: are this machine's KL numbers true?

A file for each kind of line; the problems are small, so that expectations are sums.
"""

from __future__ import annotations

from itertools import chain

from klrl.doctor.lines import Line


def examine(parity_only: bool = False) -> list[Line]:
    """Every line, in the order of the tables."""
    import torch

    from klrl.doctor import divergences, episodes, estimates, parity, rules, tokens, upstream

    torch.set_num_threads(1)
    if parity_only:
        return list(parity.parity_lines())
    return list(
        chain(
            estimates.value_lines(),
            estimates.gradient_lines(),
            estimates.off_policy_lines(),
            estimates.forgotten_ratio_lines(),
            tokens.token_lines(),
            episodes.sequence_lines(),
            episodes.placement_lines(),
            divergences.divergence_lines(),
            rules.controller_lines(),
            rules.beta_lines(),
            upstream.upstream_lines(),
        )
    )
