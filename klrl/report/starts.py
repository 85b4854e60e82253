"""Paths to trained runs, one for each seed: a run that starts from the base of its own seed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

#: Settings that name a trained run.
_PATHS = ("actor.init", "reference.path")

#: Key of the command line -> value.
Settings = dict[str, Any]


def mark_own_seeds(
    settings: Sequence[dict[str, Any]], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """The settings of all runs, with ``seed=*`` for a run's own seed in the paths of trained runs.

    Seeds 0 and 1 that start from ``outputs/base/seed=0`` and ``outputs/base/seed=1`` then have
    equal settings. A path is left as it is where its run is among as many seeds without the mark:
    those that all start from ``outputs/base/seed=0`` are one setting already.
    """
    choices = [[own, *_marked(own, seed)] for own, seed in zip(settings, seeds, strict=True)]
    if all(len(each) == 1 for each in choices):
        return list(settings)
    keys = [[json.dumps(each, sort_keys=True, default=str) for each in of] for of in choices]
    together: defaultdict[str, set[int]] = defaultdict(set)
    for of, seed in zip(keys, seeds, strict=True):
        for key in of:
            together[key].add(seed)
    # Of equal numbers the first, which has the fewest marks.
    most = [max(range(len(of)), key=lambda i: len(together[of[i]])) for of in keys]
    return [of[i] for of, i in zip(choices, most, strict=True)]


def _marked(settings: Settings, seed: int) -> list[Settings]:
    """The settings with one path or more marked, the fewest first; none without the seed in one."""
    own = re.compile(rf"(?<![A-Za-z0-9.])seed={seed}(?!\d)")
    marked = {
        key: own.sub("seed=*", path)
        for key in _PATHS
        if isinstance(path := settings.get(key), str) and own.search(path)
    }
    some = (of for n in range(1, len(marked) + 1) for of in combinations(marked, n))
    return [{**settings, **{key: marked[key] for key in of}} for of in some]
