"""A metric along training: the estimate over a setting's seeds at points of the x-axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from klrl.report.measures import column
from klrl.report.runs import Run
from klrl.report.settings import Setting
from klrl.report.statistics import Estimate, estimate_curve

#: A curve has no more points than this; rows between two points are averaged.
POINTS = 60


@dataclass(frozen=True)
class Curve:
    """One setting's learning curve.

    Attributes:
        x: frames or samples.
        y: an estimate at each.
    """

    x: list[float]
    y: list[Estimate | None]


def curve(setting: Setting, metric: str) -> Curve | None:
    """IQM and interval over seeds along the x-axis; None where no seed recorded the metric.

    A point stands for the mean of a seed's rows since the point before; where there is none, its
    last value holds. A seed that ended earlier leaves the mean.
    """
    runs = [run for run in setting.runs if metric in run.columns]
    if not runs:
        return None
    grid = _grid(runs, metric)
    seeds = np.stack([_at(grid, column(run, run.axis), column(run, metric)) for run in runs])
    there = np.isfinite(seeds).any(axis=0)
    return Curve([float(x) for x in grid[there]], estimate_curve(seeds[:, there]))


def _grid(runs: Sequence[Run], metric: str) -> NDArray[np.float64]:
    """Where the run with the most values has them, every k-th of many; the last of all is kept."""
    places = [column(run, run.axis)[np.isfinite(column(run, metric))] for run in runs]
    x = max(places, key=len)
    every = -(-len(x) // POINTS) or 1
    x = x[::-1][::every][::-1]
    end = max((place[-1] for place in places if len(place)), default=-np.inf)
    return np.append(x, end) if len(x) and end > x[-1] else x


def _at(
    grid: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean of y over each stretch (grid[i - 1], grid[i]], the last value held where it is empty."""
    answer = np.full(len(grid), np.nan)
    there = np.isfinite(y)
    stretch = np.searchsorted(grid, x[there])
    inside = stretch < len(grid)
    counts = np.bincount(stretch[inside], minlength=len(grid))
    sums = np.bincount(stretch[inside], y[there][inside], minlength=len(grid))
    held = np.maximum.accumulate(np.where(counts > 0, np.arange(len(grid)), -1))
    means = sums / np.maximum(counts, 1)
    # Not past the run's own end, up to the width of a stretch.
    alive = (held >= 0) & (np.r_[-np.inf, grid[:-1]] < x.max())
    answer[alive] = means[held[alive]]
    return answer
