"""``python -m benchmarks.published``: the tables; exit code 1 where a number of klrl's is off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain

import torch

from benchmarks.published import divergences, episodes, estimates, rules, tokens, upstream
from klrl.doctor.lines import Line, off, table


def every_line() -> Iterator[Line]:
    """All lines of klrl's own, in the order of the tables."""
    return chain(
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
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = list(every_line())
    print(table([*lines, *upstream.upstream_lines()]))
    sys.exit(bool(off(lines)))
