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
    """IQM and interval over seeds along the x-axis; None if no seed recorded the metric.

    At each point a seed has the mean of its rows since the point before, or else its last value. A
    seed that ended earlier is left out.
    """
    runs = [run for run in setting.runs if metric in run.columns]
    if not runs:
        return None
    grid = _grid(runs, metric)
    seeds = np.stack([_at(grid, column(run, run.axis), column(run, metric)) for run in runs])
    recorded = np.isfinite(seeds).any(axis=0)
    return Curve([float(x) for x in grid[recorded]], estimate_curve(seeds[:, recorded]))


def _grid(runs: Sequence[Run], metric: str) -> NDArray[np.float64]:
    """The x of the run with the most values, thinned to every k-th, and the last x of all runs."""
    places = [column(run, run.axis)[np.isfinite(column(run, metric))] for run in runs]
    x = max(places, key=len)
    every = -(-len(x) // POINTS) or 1
    x = x[::-1][::every][::-1]
    end = max((place[-1] for place in places if len(place)), default=-np.inf)
    return np.append(x, end) if len(x) and end > x[-1] else x


def _at(
    grid: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean of y over each interval (grid[i - 1], grid[i]]; an empty one has the value before it."""
    answer = np.full(len(grid), np.nan)
    recorded = np.isfinite(y)
    interval = np.searchsorted(grid, x[recorded])
    inside = interval < len(grid)
    counts = np.bincount(interval[inside], minlength=len(grid))
    sums = np.bincount(interval[inside], y[recorded][inside], minlength=len(grid))
    held = np.maximum.accumulate(np.where(counts > 0, np.arange(len(grid)), -1))
    means = sums / np.maximum(counts, 1)
    # Not past the run's own end, up to the width of an interval.
    alive = (held >= 0) & (np.r_[-np.inf, grid[:-1]] < x.max())
    answer[alive] = means[held[alive]]
    return answer
