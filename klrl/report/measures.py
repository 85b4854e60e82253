"""Computes measures, one number per run, and curves; with means over runs that differ in seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.report.statistics import Array, estimate
from klrl.runs.metrics import METRICS, Metric, metric_of

#: Keys of the returns and scores: a failed run without one gets the lowest of the task's runs.
SCORES = ("return", "eval_return", "eval_best", "gold", "eval_gold")
_REWARDS = ("reward/episode", "reward/raw")
#: KL metrics in order of preference: closed forms, then k3, an unbiased estimator that is >= 0.
_KLS = ("kl/ref/exact_seq", "kl/ref/exact", "kl/ref/k3_seq", "kl/ref/k3")


@dataclass(frozen=True)
class Measure:
    """A column of the tables, computed as one number per run."""

    key: str
    metric: Metric
    of: Callable[
        [ReadRun, str], float
    ]  # the reduction over iterations: :func:`final`, :func:`last`


def column(run: ReadRun, metric: str) -> Array:
    """Return the values of a metric, [rows]; all NaN if the run did not record it."""
    return run.columns.get(metric, np.full(run.rows, np.nan))


def recorded_metrics(runs: Iterable[ReadRun]) -> list[str]:
    """List the metrics that any run recorded, in order of declaration; undeclared ones last."""
    names = dict.fromkeys(name for run in runs for name in run.columns)
    declared = [name for name in METRICS if name in names]
    return declared + [name for name in names if name not in METRICS]


def final(run: ReadRun, metric: str) -> float:
    """Average a metric over the last tenth of the iterations; NaN without a value.

    If the last tenth has no value, since no episode ended in it, return the metric's last value.
    """
    values = column(run, metric)[run.trained]
    tail = values[-max(1, len(values) // 10) :]
    tail, values = (each[np.isfinite(each)] for each in (tail, values))
    kept = tail if len(tail) else values[-1:]
    return float(kept.mean()) if len(kept) else float("nan")


def measures(runs: Sequence[ReadRun]) -> list[Measure]:
    """List the measures that tables show for runs of one task, the return first."""
    kl, domain = kl_metric(runs), runs[0].domain
    columns = [
        ("return", reward_metric(runs), final),
        ("eval_return", "eval/return", last),
        # The spread over seeds lacks this error: the evaluations of all seeds share start states.
        ("eval_error", "eval/return_se", last),
        ("eval_best", "eval/best_return", last),
        ("gold", "reward/gold", final),
        ("eval_gold", "eval/gold", last),
        ("kl_ref", kl, final),
        # The sum over a response grows with its length; the mean per token does not.
        *([("kl_ref_token", kl[:-4], final)] if kl.endswith("_seq") else []),
        ("eval_kl", "eval/kl_ref", last),
        ("kl_old", _shared(runs, ("kl/old/exact", "kl/old/k3")), final),
        ("coef", "kl/ref/coef", last),
        ("beta", "kl/old/beta", last),
    ]
    recorded = {name for run in runs for name in run.columns}
    return [
        Measure(key, metric_of(name, domain), of)
        for key, name, of in columns
        if key in ("return", "kl_ref") or name in recorded
    ]


def last(run: ReadRun, metric: str) -> float:
    """Return the last value of a metric; NaN without one."""
    values = column(run, metric)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def reward_metric(runs: Sequence[ReadRun]) -> str:
    """Choose the reward metric that most runs recorded; in a tie, the reward per episode."""
    return _shared(runs, _REWARDS)


def kl_metric(runs: Sequence[ReadRun]) -> str:
    """Choose the KL metric that most runs recorded; in a tie, the first in :data:`_KLS`."""
    return _shared([run for run in runs if any(name in run.columns for name in _KLS)], _KLS)


def _shared(runs: Sequence[ReadRun], names: Sequence[str]) -> str:
    # Ignore failed runs, unless all failed: a run that fails early lacks metrics.
    runs = [run for run in runs if not run.failed] or runs
    recorded = {name: sum(name in run.columns for run in runs) for name in names}
    # In a tie, max returns the first.
    return max(names, key=lambda name: recorded[name]) if any(recorded.values()) else names[1]


def measured(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings of a task with their measures.

    A failed run without a score gets the lowest score of any run of the task.
    """
    columns = measures([run for setting in settings for run in setting.runs])
    every = [
        {m.key: np.array([m.of(run, m.metric.name) for run in of.runs], float) for m in columns}
        for of in settings
    ]
    failed = [np.array([run.failed for run in setting.runs]) for setting in settings]
    for key in {m.key for m in columns} & {*SCORES}:
        worst = min((v for of in every for v in of[key] if np.isfinite(v)), default=np.nan)
        for of, bad in zip(every, failed, strict=True):
            of[key][bad & ~np.isfinite(of[key])] = worst
    return [
        replace(setting, values=of, estimates={key: estimate(each) for key, each in of.items()})
        for setting, of in zip(settings, every, strict=True)
    ]


# ---------------------------------------------------------------------------------- learning curves

#: A curve has at most about this many points; each point averages the rows since the previous one.
POINTS = 60
#: Larger numbers are not drawn: matplotlib's arithmetic would overflow.
MOST = 1e100


def curve(setting: Setting, metric: str) -> tuple[Array, Array]:
    """Compute the points of a metric: x, [points], and each run's values, [runs, points].

    A value is the mean of the run's rows since the previous point or, if there are none, the
    previous value. After the end of a failed run it is the run's final value, of others NaN.
    """
    known = [column(run, run.axis)[np.isfinite(column(run, metric))] for run in setting.runs]
    x = np.unique(np.concatenate(known))
    x = x[::-1][:: -(-len(x) // POINTS) or 1][::-1]
    seeds = np.stack([_at(x, column(run, run.axis), column(run, metric)) for run in setting.runs])
    for run, values in zip(setting.runs, seeds, strict=True):
        if run.failed:
            values[(x > run.end) & np.isnan(values)] = final(run, metric)
    return x, np.where(np.abs(seeds) > MOST, np.nan, seeds)


def _at(grid: Array, x: Array, y: Array) -> Array:
    """Average y over each interval (grid[i - 1], grid[i]]; fill gaps with the previous average."""
    answer = np.full(len(grid), np.nan)
    recorded = np.isfinite(y)
    interval = np.searchsorted(grid, x[recorded])
    inside = interval < len(grid)
    counts = np.bincount(interval[inside], minlength=len(grid))
    sums = np.bincount(interval[inside], y[recorded][inside], minlength=len(grid))
    held = np.maximum.accumulate(np.where(counts > 0, np.arange(len(grid)), -1))
    means = sums / np.maximum(counts, 1)
    # Intervals that begin at or after the run's end get no value.
    alive = (held >= 0) & (np.r_[-np.inf, grid[:-1]] < x.max(initial=-np.inf))
    answer[alive] = means[held[alive]]
    return answer
