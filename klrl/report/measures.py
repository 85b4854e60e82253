"""What a run comes to: one number per run and measure, and which metrics runs are compared by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from klrl.report.runs import Run

#: KL(old||new) is in band within this factor of loss.dtarg, from the iteration after these on.
BAND = 1.5
WARM_UP = 10

_REWARDS = ("reward/episode", "reward/raw")
#: Closed forms first: k3 is unbiased too, and like them never negative.
_KLS = ("kl/ref/exact_seq", "kl/ref/exact", "kl/ref/k3_seq", "kl/ref/k3")
_SPEEDS = ("time/samples_per_second", "time/frames_per_second")


@dataclass(frozen=True)
class Measure:
    """One number per run.

    Attributes:
        key: its name in the CSV.
        title: its name on the page.
        unit: its unit.
        of: the number; NaN where the run has none.
    """

    key: str
    title: str
    unit: str
    of: Callable[[Run], float]


def column(run: Run, metric: str) -> NDArray[np.float64]:
    """A metric of a run by iteration; all NaN where it was not recorded."""
    return run.columns.get(metric, np.full(run.rows, np.nan))


def final(run: Run, *metrics: str) -> float:
    """Mean of the last tenth of the iterations, of the first of the metrics that has values there.

    Where that tenth has no value (no episode ended), the last one recorded.
    """
    for metric in metrics:
        values = column(run, metric)
        tail = values[-max(1, len(values) // 10) :]
        for part in (tail, values):
            there = part[np.isfinite(part)]
            if len(there):
                return float(there.mean() if part is tail else there[-1])
    return float("nan")


def in_band(run: Run) -> float:
    """Share of the iterations after the tenth with KL(old||new) within 1.5 times loss.dtarg."""
    target = run.settings.get("loss.dtarg")
    kl = column(run, "kl/old/exact")[WARM_UP:]
    kl = kl[np.isfinite(kl)]
    if not target or not len(kl):
        return float("nan")
    return float((np.abs(np.log(np.maximum(kl, 1e-12) / target)) <= np.log(BAND)).mean())


def seconds(run: Run) -> float:
    """Seconds of all iterations; NaN where they were not timed."""
    times = column(run, "time/iteration")
    return float(np.nansum(times)) if np.isfinite(times).any() else float("nan")


def speed(run: Run) -> float:
    """Median frames (samples) per second over the iterations."""
    for metric in _SPEEDS:
        values = column(run, metric)
        if np.isfinite(values).any():
            return float(np.nanmedian(values))
    return float("nan")


def measures(runs: Sequence[Run]) -> list[Measure]:
    """The columns of the table for runs of one task."""
    reward, kl, per = reward_metric(runs), kl_metric(runs), per_kl(runs)
    found = [
        Measure("return", "final return", unit_of_reward(runs), lambda run: final(run, reward)),
        Measure("eval_return", "evaluation", "last return", lambda run: _last(run, "eval/return")),
        Measure("gold", "gold score", "per response", lambda run: final(run, "reward/gold")),
        Measure("eval_gold", "evaluation", "last gold", lambda run: _last(run, "eval/gold")),
        Measure("kl_ref", "KL(policy||reference)", f"nats per {per}", lambda run: final(run, kl)),
        Measure(
            "kl_old",
            "KL(old||new)",
            f"nats per {unit_of_kl(runs)}",
            lambda run: final(run, "kl/old/exact"),
        ),
        Measure("coef", "kl.coef", "at the end", lambda run: _last(run, "kl/ref/coef")),
        Measure("beta", "loss.beta", "at the end", lambda run: _last(run, "kl/old/beta")),
        Measure("in_band", "in band", "share of iterations", in_band),
        Measure("speed", "throughput", f"{runs[0].axis} per second", speed),
        Measure("seconds", "time", "seconds", seconds),
    ]
    gold = any("reward/gold" in run.columns or "eval/gold" in run.columns for run in runs)
    return [measure for measure in found if gold or "gold" not in measure.key]


def _last(run: Run, metric: str) -> float:
    values = column(run, metric)
    there = values[np.isfinite(values)]
    return float(there[-1]) if len(there) else float("nan")


def reward_metric(runs: Sequence[Run]) -> str:
    """The reward that all of these runs recorded: of episodes, else per frame."""
    return _shared(runs, _REWARDS)


def kl_metric(runs: Sequence[Run]) -> str:
    """The KL(policy||reference) that all runs with any recorded: runs must be comparable."""
    return _shared([run for run in runs if any(name in run.columns for name in _KLS)], _KLS)


def _shared(runs: Sequence[Run], names: Sequence[str]) -> str:
    for name in names:
        if runs and all(name in run.columns for run in runs):
            return name
    return names[1]


def unit_of_reward(runs: Sequence[Run]) -> str:
    """What the final reward is a mean over."""
    whole = "response" if runs[0].axis == "samples" else "episode"
    return f"per {whole if reward_metric(runs) == 'reward/episode' else unit_of_kl(runs)}"


def per_kl(runs: Sequence[Run]) -> str:
    """What the KL(policy||reference) of :func:`kl_metric` is a mean over."""
    return "response" if kl_metric(runs).endswith("_seq") else unit_of_kl(runs)


def unit_of_kl(runs: Sequence[Run]) -> str:
    """What a per-step KL is a mean over."""
    return "token" if runs[0].axis == "samples" else "frame"
