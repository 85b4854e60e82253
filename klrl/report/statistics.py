"""The interquartile mean, its bootstrap interval and Pareto fronts, as functions of arrays.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Resamples for the intervals of single numbers and of curves.
RESAMPLES = 5000
CURVE_RESAMPLES = 500
#: Values in one block of resamples: 32 MB.
_BLOCK = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """An interquartile mean over seeds and its interval.

    Attributes:
        value: the interquartile mean.
        low: lower end of the interval; None with one seed.
        high: upper end; None with one seed.
        seeds: number of seeds with a value.
    """

    value: float
    low: float | None
    high: float | None
    seeds: int


def iqm(values: Array, axis: int = 0) -> Array:
    """Interquartile mean: floor(n / 4) values are left out at either end.

    Args:
        values: any shape, finite.
        axis: the axis of length n, which is dropped.
    """
    ordered = np.sort(values, axis=axis)
    n = ordered.shape[axis]
    cut = n // 4
    return np.take(ordered, range(cut, n - cut), axis=axis).mean(axis=axis)


def bootstrap_interval(
    scores: Array,
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
) -> tuple[Array, Array]:
    """Both ends of the stratified percentile-bootstrap interval of the IQM.

    Runs are resampled with replacement within each task, so that every resample has as many runs of
    each task as the data.

    Args:
        scores: [runs, tasks] or [runs, tasks, points]; one interval per point.
        resamples: how many.
        level: coverage, 0.95 for 95 %.
        rng: default: seeded with 0, so that reports are reproducible.

    Returns:
        Two arrays of shape [points], or [] for two-dimensional scores.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    runs, tasks = scores.shape[:2]
    points = scores.reshape(runs, tasks, -1)
    block = max(1, _BLOCK // points.size)
    means = []
    for start in range(0, resamples, block):
        draws = min(block, resamples - start)
        chosen = rng.integers(runs, size=(draws, runs, tasks))
        drawn = points[chosen, np.arange(tasks)]
        means.append(iqm(drawn.reshape(draws, runs * tasks, -1), axis=1))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    shape = scores.shape[2:]
    return low.reshape(shape), high.reshape(shape)


def estimate(values: Array) -> Estimate | None:
    """The IQM over seeds with its 95 % interval, without NaNs; None if nothing is left."""
    curve = estimate_curve(np.asarray(values, float)[:, None], RESAMPLES)
    return curve[0]


def estimate_curve(values: Array, resamples: int = CURVE_RESAMPLES) -> list[Estimate | None]:
    """:func:`estimate` at every point of a curve.

    Args:
        values: [seeds, points]; NaN where a seed has no value.
        resamples: how many.
    """
    recorded = np.isfinite(values)
    estimates: list[Estimate | None] = [None] * values.shape[1]
    # Points with the same seeds share their resamples. There are few such groups: a seed ends once.
    for mask in np.unique(recorded, axis=1).T:
        n = int(mask.sum())
        if not n:
            continue
        at = np.flatnonzero((recorded == mask[:, None]).all(axis=0))
        scores = values[np.ix_(mask, at)]
        middle = iqm(scores)
        if n == 1:
            for k, i in enumerate(at):
                estimates[i] = Estimate(float(middle[k]), None, None, 1)
            continue
        low, high = bootstrap_interval(scores[:, None, :], resamples=resamples)
        for k, i in enumerate(at):
            estimates[i] = Estimate(float(middle[k]), float(low[k]), float(high[k]), n)
    return estimates


def pareto_front(cost: Array, gain: Array) -> list[int]:
    """Indices of the points on the Pareto front, by rising cost.

    A point is dominated if another costs no more and gains no less, one of the two strictly.
    """
    order = np.lexsort((-gain, cost))
    front: list[int] = []
    for i in order:
        last = (cost[front[-1]], gain[front[-1]]) if front else (-np.inf, -np.inf)
        if gain[i] > last[1] or (cost[i], gain[i]) == last:
            front.append(int(i))
    return front


def at_equal_cost(cost: Array, gain: Array, levels: Array) -> Array:
    """Gain at given costs, interpolated linearly between points; NaN outside their range.

    Args:
        cost: [points], in any order.
        gain: [points].
        levels: [levels].
    """
    order = np.argsort(cost, kind="stable")
    return np.interp(levels, cost[order], gain[order], left=np.nan, right=np.nan)
