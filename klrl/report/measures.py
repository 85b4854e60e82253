"""Computes measures, one number per run, and their estimates per setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.report.statistics import Array, Estimate, estimate
from klrl.runs.metrics import METRICS, Metric, Row, metric_of

#: KL(old||new) is in band within this factor of loss.dtarg, after WARM_UP iterations.
BAND = 1.5
WARM_UP = 10

#: Measures that are a return or a score, by their keys.
SCORES = ("return", "eval_return", "eval_best", "gold", "eval_gold")

EPISODE_REWARD = "reward/episode"
_REWARDS = (EPISODE_REWARD, "reward/raw")
#: Closed forms first, then k3, which is also unbiased and never negative.
_KLS = ("kl/ref/exact_seq", "kl/ref/exact", "kl/ref/k3_seq", "kl/ref/k3")

#: A measure that is not a metric of a row.
_IN_BAND = Metric(
    "in_band",
    "in band",
    "iterations after the tenth with KL(old||new) within a factor 1.5 of loss.dtarg",
    "share of iterations",
)


@dataclass(frozen=True)
class Measure:
    """One number per run."""

    key: str
    metric: Metric
    how: str  # final, last, median or sum over iterations; empty if the unit implies it
    of: Callable[[ReadRun], float]  # run -> its number; NaN if it has none
    score: bool = False  # whether a failed run may get the task's worst value


def column(run: ReadRun, metric: str) -> Array:
    """Return a metric of a run by row; all NaN if it was not recorded."""
    return run.columns.get(metric, np.full(run.rows, np.nan))


def recorded_metrics(runs: Iterable[ReadRun]) -> list[str]:
    """List the metrics that any run recorded, in order of declaration; undeclared ones last."""
    names = dict.fromkeys(name for run in runs for name in run.columns)
    declared = [name for name in METRICS if name in names]
    return declared + [name for name in names if name not in METRICS]


def final(run: ReadRun, *metrics: str) -> float:
    """Average the first recorded metric of ``metrics`` over the last tenth of the iterations.

    If that tenth has no value (no episode ended), return the last recorded one.
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
    """Share of iterations, from the eleventh, with KL(old||new) within a factor 1.5 of target."""
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
    """Total seconds of the iterations; NaN if they were not timed."""
    times = column(run, "time/iteration")
    return float(np.nansum(times)) if np.isfinite(times).any() else float("nan")


def speed(run: ReadRun) -> float:
    """Median throughput of the iterations, on the run's axis."""
    values = column(run, f"time/{run.axis}_per_second")
    return float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")


def measures(runs: Sequence[ReadRun]) -> list[Measure]:
    """List the columns of the table for runs of one task, the score first."""
    reward, kl, domain = reward_metric(runs), kl_metric(runs), runs[0].domain
    rate = metric_of(f"time/{domain.axis}_per_second", domain)
    columns = [
        _of("return", reward, "final", runs),
        _of("eval_return", "eval/return", "last", runs),
        # All seeds share the start states, so the range over seeds does not contain this error.
        _of("eval_error", "eval/return_se", "last", runs),
        _of("eval_best", "eval/best_return", "last", runs),
        _of("gold", "reward/gold", "final", runs),
        _of("eval_gold", "eval/gold", "last", runs),
        _of("kl_ref", kl, "final", runs),
        # A sum over a response grows with its length; the mean per token separates the effects.
        _of("kl_ref_token", kl.removesuffix("_seq"), "final", runs),
        _of("eval_kl", "eval/kl_ref", "last", runs),
        _of("kl_old", "kl/old/exact", "final", runs),
        _of("coef", "kl/ref/coef", "last", runs),
        _of("beta", "kl/old/beta", "last", runs),
        Measure("in_band", _IN_BAND, "", in_band),
        Measure("speed", rate, "median", speed),
        Measure("seconds", metric_of("time/iteration", domain), "sum", seconds),
    ]
    recorded = {name for run in runs for name in run.columns}
    unused = set() if recorded & {"reward/gold", "eval/gold"} else {"gold", "eval_gold"}
    unused |= set() if "eval/best_return" in recorded else {"eval_best"}
    unused |= set() if "eval/return_se" in recorded else {"eval_error"}
    unused |= set() if "eval/kl_ref" in recorded else {"eval_kl"}
    unused |= set() if kl.endswith("_seq") else {"kl_ref_token"}
    return [measure for measure in columns if measure.key not in unused]


def _of(key: str, name: str, how: str, runs: Sequence[ReadRun]) -> Measure:
    """Make a measure of a metric: its final mean or its last value."""
    ways: dict[str, Callable[[ReadRun, str], float]] = {"final": final, "last": _last}
    of = metric_of(name, runs[0].domain)
    return Measure(key, of, how, lambda run: ways[how](run, name), key in SCORES)


def _last(run: ReadRun, metric: str) -> float:
    values = column(run, metric)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def last_evaluated(run: ReadRun, metric: str) -> Row:
    """Return the row of the last evaluation with a value of this metric; empty if none."""
    at = np.flatnonzero(np.isfinite(column(run, metric)))
    if not len(at):
        return {}
    row = {name: float(values[at[-1]]) for name, values in run.columns.items()}
    return {name: value for name, value in row.items() if np.isfinite(value)}


def reward_metric(runs: Sequence[ReadRun]) -> str:
    """Choose the reward that all runs recorded: per episode, else per frame; else the commonest."""
    return _shared(runs, _REWARDS)


def kl_metric(runs: Sequence[ReadRun]) -> str:
    """Choose the best KL estimate that all runs with a KL recorded, so that they are comparable."""
    return _shared([run for run in runs if any(name in run.columns for name in _KLS)], _KLS)


def compared_by(runs: Sequence[ReadRun], name: str) -> str:
    """Return the metric that a comparison of these runs uses for a declared metric."""
    by = {_REWARDS[0]: reward_metric, _KLS[1]: kl_metric}.get(name)
    return by(runs) if by else name


def _shared(runs: Sequence[ReadRun], names: Sequence[str]) -> str:
    # Ignore failed runs if possible: early failures lack metrics that all others have.
    runs = [run for run in runs if not run.failed] or runs
    recorded = {name: sum(name in run.columns for run in runs) for name in names}
    # In a tie the first is taken.
    return max(names, key=lambda name: recorded[name]) if any(recorded.values()) else names[1]


@dataclass(frozen=True)
class Line:
    """One setting's row of the table."""

    setting: Setting
    values: dict[str, Array]  # Measure.key -> a number per run; NaN if it has none
    estimates: dict[str, Estimate | None]  # Measure.key -> estimate; None if no seed has the number

    def seeds(self, key: str) -> Array:
        """Return the numbers of this measure for the runs that have it."""
        values = self.values.get(key, np.zeros(0))
        return values[np.isfinite(values)]

    @property
    def worst(self) -> float | None:
        """The lowest final return among its seeds."""
        score = self.estimates["return"]
        return score.least if score else None


def summary_lines(settings: Sequence[Setting], failed: str = "last") -> list[Line]:
    """Make one line per setting of a task.

    With ``failed=worst``, a failed run gets the lowest scores of any run of the task; a failed
    run without recorded scores gets them in any case.
    """
    columns = measures([run for setting in settings for run in setting.runs])
    every = [
        {m.key: np.array([m.of(run) for run in setting.runs], float) for m in columns}
        for setting in settings
    ]
    for measure in columns:
        if measure.score:
            each = [values[measure.key] for values in every]
            _let_failed_count(each, settings, failed)
    return [
        Line(setting, values, {key: estimate(each) for key, each in values.items()})
        for setting, values in zip(settings, every, strict=True)
    ]


def _let_failed_count(values: Sequence[Array], settings: Sequence[Setting], failed: str) -> None:
    """Give failed runs the lowest value of all runs, if ``failed`` is worst or they have none."""
    recorded = np.concatenate([*values, np.zeros(0)])
    recorded = recorded[np.isfinite(recorded)]
    if not len(recorded):
        return
    for of_setting, setting in zip(values, settings, strict=True):
        for i, run in enumerate(setting.runs):
            if run.failed and (failed == "worst" or not np.isfinite(of_setting[i])):
                of_setting[i] = recorded.min()


def line_value(line: Line, key: str) -> float:
    """Return the estimate's value; NaN if there is none."""
    estimated = line.estimates[key]
    return estimated.value if estimated else float("nan")
