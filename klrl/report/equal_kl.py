"""Compares families of runs by their return at equal KL(policy||reference)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from klrl.report.measures import Line, kl_metric, reward_metric
from klrl.report.settings import identity, names_of
from klrl.report.statistics import Estimate, at_equal_cost, estimate_curve
from klrl.runs.metrics import Metric, metric_of

#: The runs of a family differ only in these settings and in their seed.
KNOBS = ("kl.coef", "controller.target")


@dataclass(frozen=True)
class EqualKL:
    """The return of each family at the same levels of KL(policy||reference)."""

    levels: list[float]
    families: dict[str, list[Estimate | None]]
    kl: Metric
    reward: Metric


def equal_kl(lines: Sequence[Line]) -> EqualKL:
    """Estimate the return of each family at equal KLs, which are called levels.

    For each seed of a family, the final return is interpolated linearly in sqrt(KL) between the
    runs of that seed. The levels are 1/4, 1/2 and 3/4 of the way through the range of sqrt(KL) that
    all seeds of all families cover. Beyond it, families would be compared on different seeds.
    """
    runs = [run for line in lines for run in line.setting.runs]
    families: dict[str, dict[int, list[tuple[float, float]]]] = {}
    kl, reward = (metric_of(each(runs), runs[0].domain) for each in (kl_metric, reward_metric))
    stripped = [
        replace(run, settings={k: v for k, v in run.settings.items() if k not in KNOBS})
        for run in runs
    ]
    titles = names_of(stripped)
    values = [np.concatenate([line.values[key] for line in lines]) for key in ("kl_ref", "return")]
    roots = np.sqrt(np.maximum(values[0], 0.0))
    for family, point in zip(stripped, zip(roots, values[1], strict=True), strict=True):
        if np.isfinite(point).all():
            seeds = families.setdefault(titles[identity(family)], {})
            seeds.setdefault(family.seed, []).append(point)
    # Interpolation needs two points.
    usable = {
        name: [np.array(points) for points in seeds.values() if len(points) > 1]
        for name, seeds in families.items()
    }
    usable = {name: seeds for name, seeds in usable.items() if seeds}
    covered = [points[:, 0] for seeds in usable.values() for points in seeds]
    low = max((each.min() for each in covered), default=0.0)
    high = min((each.max() for each in covered), default=0.0)
    if low >= high:
        return EqualKL([], {}, kl, reward)
    levels = low + (high - low) * np.array([0.25, 0.5, 0.75])
    estimates = {
        name: estimate_curve(np.stack([at_equal_cost(p[:, 0], p[:, 1], levels) for p in seeds]))
        for name, seeds in usable.items()
    }
    return EqualKL([float(root**2) for root in levels], estimates, kl, reward)
