"""Computes measures, one number per run, and their means over runs that differ only in seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.report.statistics import Array, Estimate, estimate
from klrl.runs.metrics import METRICS, Metric, Row, metric_of

#: KL(old||new) is in band if it is within this factor of its target.
BAND = 1.5
#: :func:`in_band` leaves out this many iterations at the start of a run.
WARM_UP = 10

#: Keys of the returns and scores; a failed run may get the lowest value of the task's runs.
SCORES = ("return", "eval_return", "eval_best", "gold", "eval_gold")
#: Keys of the measures that are left out if no run recorded their metric.
_IF_RECORDED = ("eval_error", "eval_best", "gold", "eval_gold", "eval_kl")

EPISODE_REWARD = "reward/episode"
_REWARDS = (EPISODE_REWARD, "reward/raw")
#: KL metrics in order of preference: closed forms, then k3, an unbiased estimator that is >= 0.
_KLS = ("kl/ref/exact_seq", "kl/ref/exact", "kl/ref/k3_seq", "kl/ref/k3")

#: The metric of :func:`in_band`; ``metrics.yaml`` lacks it, since no row contains it.
_IN_BAND = Metric(
    "in_band",
    "in band",
    "iterations after the tenth with KL(old||new) within a factor 1.5 of loss.dtarg",
    "share of iterations",
)


@dataclass(frozen=True)
class Measure:
    """A column of the tables, computed as one number per run."""

    key: str
    metric: Metric
    how: str  # reduction over iterations: final, last, median or sum; empty for in_band
    of: Callable[[ReadRun], float]  # computes a run's number; NaN if the run has none


def column(run: ReadRun, metric: str) -> Array:
    """Return the values of a metric, [rows]; all NaN if the run did not record it."""
    return run.columns.get(metric, np.full(run.rows, np.nan))


def recorded_metrics(runs: Iterable[ReadRun]) -> list[str]:
    """List the metrics that any run recorded, in order of declaration; undeclared ones last."""
    names = dict.fromkeys(name for run in runs for name in run.columns)
    declared = [name for name in METRICS if name in names]
    return declared + [name for name in names if name not in METRICS]


def final(run: ReadRun, *metrics: str) -> float:
    """Average a metric over the last tenth of the iterations: the first of ``metrics`` with values.

    If the last tenth has no value, since no episode ended in it, return the metric's last value.
    """
    for metric in metrics:
        values = column(run, metric)[run.trained]
        tail = values[-max(1, len(values) // 10) :]
        for part in (tail, values):
            finite = part[np.isfinite(part)]
            if len(finite):
                return float(finite.mean() if part is tail else finite[-1])
    return float("nan")


def in_band(run: ReadRun) -> float:
    """Return the share of iterations with KL(old||new) in band, from the eleventh iteration on."""
    kl, annealed = (
        column(run, name)[run.trained][WARM_UP:] for name in ("kl/old/exact", "kl/old/target")
    )
    target = np.where(np.isfinite(annealed), annealed, run.settings.get("loss.dtarg") or np.nan)
    known = np.isfinite(kl) & np.isfinite(target)
    if not known.any():
        return float("nan")
    away = np.abs(np.log(np.maximum(kl[known], 1e-12) / target[known]))
    return float((away <= np.log(BAND)).mean())


def seconds(run: ReadRun) -> float:
    """Return the total seconds of the iterations; NaN if they were not timed."""
    times = column(run, "time/iteration")
    return float(np.nansum(times)) if np.isfinite(times).any() else float("nan")


def speed(run: ReadRun) -> float:
    """Return the median speed of the iterations, in frames or samples per second."""
    values = column(run, f"time/{run.axis}_per_second")
    return float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")


def measures(runs: Sequence[ReadRun]) -> list[Measure]:
    """List the measures that tables show for runs of one task, the return first."""
    reward, kl, domain = reward_metric(runs), kl_metric(runs), runs[0].domain
    rate = metric_of(f"time/{domain.axis}_per_second", domain)
    columns = [
        _of("return", reward, "final", runs),
        _of("eval_return", "eval/return", "last", runs),
        # The spread over seeds lacks this error: the evaluations of all seeds share start states.
        _of("eval_error", "eval/return_se", "last", runs),
        _of("eval_best", "eval/best_return", "last", runs),
        _of("gold", "reward/gold", "final", runs),
        _of("eval_gold", "eval/gold", "last", runs),
        _of("kl_ref", kl, "final", runs),
        # The sum over a response grows with its length; the mean per token does not.
        *([_of("kl_ref_token", kl[:-4], "final", runs)] if kl.endswith("_seq") else []),
        _of("eval_kl", "eval/kl_ref", "last", runs),
        _of("kl_old", "kl/old/exact", "final", runs),
        _of("coef", "kl/ref/coef", "last", runs),
        _of("beta", "kl/old/beta", "last", runs),
        Measure("in_band", _IN_BAND, "", in_band),
        Measure("speed", rate, "median", speed),
        Measure("seconds", metric_of("time/iteration", domain), "sum", seconds),
    ]
    recorded = {name for run in runs for name in run.columns}
    return [m for m in columns if m.key not in _IF_RECORDED or m.metric.name in recorded]


def _of(key: str, name: str, how: str, runs: Sequence[ReadRun]) -> Measure:
    """Make a measure of a metric: its final mean or its last value."""
    ways: dict[str, Callable[[ReadRun, str], float]] = {"final": final, "last": _last}
    of = metric_of(name, runs[0].domain)
    return Measure(key, of, how, lambda run: ways[how](run, name))


def _last(run: ReadRun, metric: str) -> float:
    values = column(run, metric)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def last_evaluated(run: ReadRun, metric: str) -> Row:
    """Return the last row that has a value of a metric, without NaNs; {} without such a row."""
    at = np.flatnonzero(np.isfinite(column(run, metric)))
    if not len(at):
        return {}
    row = {name: float(values[at[-1]]) for name, values in run.columns.items()}
    return {name: value for name, value in row.items() if np.isfinite(value)}


def reward_metric(runs: Sequence[ReadRun]) -> str:
    """Choose the reward metric that most runs recorded; in a tie, the reward per episode."""
    return _shared(runs, _REWARDS)


def kl_metric(runs: Sequence[ReadRun]) -> str:
    """Choose the KL metric that most runs recorded; in a tie, the first in :data:`_KLS`."""
    return _shared([run for run in runs if any(name in run.columns for name in _KLS)], _KLS)


def compared_by(runs: Sequence[ReadRun], name: str) -> str:
    """Return ``name`` or, for the reward or the KL, the variant that most runs recorded."""
    by = {_REWARDS[0]: reward_metric, _KLS[1]: kl_metric}.get(name)
    return by(runs) if by else name


def _shared(runs: Sequence[ReadRun], names: Sequence[str]) -> str:
    # Ignore failed runs, unless all failed: a run that fails early lacks metrics.
    runs = [run for run in runs if not run.failed] or runs
    recorded = {name: sum(name in run.columns for run in runs) for name in names}
    # In a tie, max returns the first.
    return max(names, key=lambda name: recorded[name]) if any(recorded.values()) else names[1]


@dataclass(frozen=True)
class Line:
    """A setting (runs that differ only in their seed) and its measures: a row in the tables."""

    setting: Setting
    values: dict[str, Array]  # Measure.key -> a number per run; NaN for a run without one
    estimates: dict[str, Estimate | None]  # Measure.key -> estimate; None if no seed has a number

    def seeds(self, key: str) -> Array:
        """Return a measure's numbers, [runs]; leave out the runs that have none."""
        values = self.values.get(key, np.zeros(0))
        return values[np.isfinite(values)]

    @property
    def worst(self) -> float | None:
        """The lowest final return of a seed; None without returns."""
        score = self.estimates["return"]
        return score.least if score else None


def summary_lines(settings: Sequence[Setting], failed: str = "last") -> list[Line]:
    """Make one line per setting of a task.

    A failed run without a score gets the lowest score of any run of the task. With
    ``failed=worst``, every failed run gets the lowest score.
    """
    columns = measures([run for setting in settings for run in setting.runs])
    every = [
        {m.key: np.array([m.of(run) for run in setting.runs], float) for m in columns}
        for setting in settings
    ]
    for key in SCORES:
        _let_failed_count([of[key] for of in every if key in of], settings, failed)
    return [
        Line(setting, values, {key: estimate(each) for key, each in values.items()})
        for setting, values in zip(settings, every, strict=True)
    ]


def _let_failed_count(values: Sequence[Array], settings: Sequence[Setting], failed: str) -> None:
    """Give failed runs the lowest value of any run if they lack a value, or ``failed`` is worst."""
    recorded = np.concatenate([*values, np.zeros(0)])
    recorded = recorded[np.isfinite(recorded)]
    if not len(recorded):
        return
    for of_setting, setting in zip(values, settings, strict=True):
        for i, run in enumerate(setting.runs):
            if run.failed and (failed == "worst" or not np.isfinite(of_setting[i])):
                of_setting[i] = recorded.min()


def line_value(line: Line, key: str) -> float:
    """Return the value of a measure's estimate; NaN without an estimate."""
    estimated = line.estimates[key]
    return estimated.value if estimated else float("nan")
