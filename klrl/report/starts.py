"""Paths to trained runs, one for each seed: a run that starts from the base of its own seed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence

#: Settings that name a trained run.
_PATHS = ("actor.init", "reference.path")


def mark_own_seeds(
    settings: Sequence[dict[str, object]], seeds: Sequence[int]
) -> list[dict[str, object]]:
    """The settings of all runs, with ``seed=*`` for a run's own seed in the paths of trained runs.

    Seeds 0 and 1 that start from ``outputs/base/seed=0`` and ``outputs/base/seed=1`` then have
    equal settings. A path stays where no other seed of the same settings has its own seed in it:
    those that all start from ``outputs/base/seed=0`` are one setting already.
    """
    result = [dict(each) for each in settings]
    others = [{k: v for k, v in each.items() if k not in _PATHS} for each in settings]
    alike = [json.dumps(each, sort_keys=True, default=str) for each in others]
    for key in _PATHS:
        together: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        marked = []
        for own, seed, rest in zip(settings, seeds, alike, strict=True):
            pattern = rf"(?<![A-Za-z0-9.])seed={seed}(?!\d)"
            path, count = re.subn(pattern, "seed=*", str(own.get(key)))
            marked.append((rest, path) if count else None)
            together[rest, path] |= {seed} if count else set()
        for each, mark in zip(result, marked, strict=True):
            if mark and len(together[mark]) > 1:
                each[key] = mark[1]
    return result
