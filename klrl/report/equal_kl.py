"""Compares families of runs by their return at equal KL(policy||reference)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from klrl.report.settings import Setting, identity, names_of
from klrl.report.statistics import Estimate, estimate_curve

#: The runs of a family differ only in these settings and in their seed.
KNOBS = ("kl.coef", "controller.target")


def equal_kl(settings: Sequence[Setting]) -> tuple[list[float], dict[str, list[Estimate | None]]]:
    """Estimate the return of each family at equal KLs; return these levels, and the estimates.

    For each seed of a family, the final return is interpolated linearly in sqrt(KL) between the
    runs of that seed. The levels are 1/4, 1/2 and 3/4 of the way through the range of sqrt(KL) that
    all seeds of all families cover. Beyond it, families would be compared on different seeds.
    Without such a range, both results are empty.
    """
    runs = [run for setting in settings for run in setting.runs]
    families = [
        replace(run, settings={k: v for k, v in run.settings.items() if k not in KNOBS})
        for run in runs
    ]
    names = names_of(families)
    kl, returns = (
        np.concatenate([of.values[key] for of in settings]) for key in ("kl_ref", "return")
    )
    points: dict[str, dict[int, list[list[float]]]] = {}
    for family, *point in zip(families, np.sqrt(np.maximum(kl, 0.0)), returns, strict=True):
        if np.isfinite(point).all():
            seeds = points.setdefault(names[identity(family)], {})
            seeds.setdefault(family.seed, []).append(point)
    # Interpolation needs two points, in order of KL.
    usable = {
        name: [np.array(sorted(of)) for of in seeds.values() if len(of) > 1]
        for name, seeds in points.items()
    }
    covered = [of[:, 0] for seeds in usable.values() for of in seeds]
    low = max((each.min() for each in covered), default=0.0)
    high = min((each.max() for each in covered), default=0.0)
    if low >= high:
        return [], {}
    levels = low + (high - low) * np.array([0.25, 0.5, 0.75])
    return [float(root**2) for root in levels], {
        name: estimate_curve(np.stack([np.interp(levels, *of.T) for of in seeds]))
        for name, seeds in usable.items()
        if seeds
    }
