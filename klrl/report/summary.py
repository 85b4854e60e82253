"""The numbers of a report: what each run comes to, each setting's estimate, and its curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from klrl.report.runs import Run, Setting, identity, names_of
from klrl.report.statistics import (
    Estimate,
    at_equal_cost,
    estimate,
    estimate_curve,
    pareto_front,
)

#: A curve has no more points than this; rows between two points are averaged.
POINTS = 60
#: KL(old||new) is in band within this factor of loss.dtarg, from the iteration after these on.
BAND = 1.5
WARM_UP = 10
#: The settings that move a run along the frontier; the rest of the settings makes the frontier.
KNOBS = ("kl.coef", "controller.target")

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


@dataclass(frozen=True)
class Line:
    """One setting's row of the table.

    Attributes:
        setting: whose.
        estimates: by :attr:`Measure.key`; None where no seed has the number.
        worst: the least final return among its seeds.
    """

    setting: Setting
    estimates: dict[str, Estimate | None]
    worst: float | None


@dataclass(frozen=True)
class Curve:
    """One setting's learning curve.

    Attributes:
        x: frames or samples.
        y: an estimate at each.
    """

    x: list[float]
    y: list[Estimate | None]


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
    """Seconds of all iterations."""
    return float(np.nansum(column(run, "time/iteration"))) if run.rows else float("nan")


def speed(run: Run) -> float:
    """Median frames (samples) per second over the iterations."""
    for metric in _SPEEDS:
        values = column(run, metric)
        if np.isfinite(values).any():
            return float(np.nanmedian(values))
    return float("nan")


def measures(runs: Sequence[Run]) -> list[Measure]:
    """The columns of the table for runs of one task."""
    reward, kl = reward_metric(runs), kl_metric(runs)
    per = "response" if kl.endswith("_seq") else unit_of_kl(runs)
    return [
        Measure(
            "return",
            "final return",
            unit_of_reward(runs),
            lambda run: final(run, reward),
        ),
        Measure("eval_return", "evaluation", "last return", lambda run: _last(run, "eval/return")),
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


def unit_of_kl(runs: Sequence[Run]) -> str:
    """What a per-step KL is a mean over."""
    return "token" if runs[0].axis == "samples" else "frame"


def table(settings: Sequence[Setting]) -> list[Line]:
    """One line per setting of one task."""
    columns = measures([run for setting in settings for run in setting.runs])
    lines = []
    for setting in settings:
        values = {m.key: np.array([m.of(run) for run in setting.runs]) for m in columns}
        returns = values["return"][np.isfinite(values["return"])]
        worst = float(returns.min()) if len(returns) else None
        lines.append(Line(setting, {k: estimate(v) for k, v in values.items()}, worst))
    return lines


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


def frontier(lines: Sequence[Line]) -> list[int]:
    """Indices of the lines on the Pareto front of much reward at little KL(policy||reference)."""
    placed = [
        i for i, line in enumerate(lines) if line.estimates["return"] and line.estimates["kl_ref"]
    ]
    kl = np.array([line_value(lines[i], "kl_ref") for i in placed])
    reward = np.array([line_value(lines[i], "return") for i in placed])
    return [placed[k] for k in pareto_front(kl, reward)]


def line_value(line: Line, key: str) -> float:
    """The estimate's value; NaN where there is none."""
    found = line.estimates[key]
    return found.value if found else float("nan")


@dataclass(frozen=True)
class EqualKL:
    """Reward at equal KL(policy||reference), by family of settings.

    Attributes:
        levels: KLs, nats.
        families: name -> an estimate per level; None outside the family's range.
    """

    levels: list[float]
    families: dict[str, list[Estimate | None]]


def equal_kl(settings: Sequence[Setting]) -> EqualKL:
    """Compare families, that is settings that differ in how strongly the KL is held, at equal KLs.

    Per seed, reward is linear in sqrt(KL) between the ends of its runs (see :data:`KNOBS`); the
    levels divide the range that every seed of every family covers into quarters: a level that only
    some seeds reach would compare seeds, not families.

    Args:
        settings: those of one task.
    """
    runs = [run for setting in settings for run in setting.runs]
    families: dict[str, dict[int, list[tuple[float, float]]]] = {}
    kl, reward = kl_metric(runs), reward_metric(runs)
    stripped = [_without_knobs(run) for run in runs]
    titles = names_of(stripped)
    for run, family in zip(runs, stripped, strict=True):
        point = (max(final(run, kl), 0.0) ** 0.5, final(run, reward))
        if np.isfinite(point).all():
            seeds = families.setdefault(titles[identity(family)], {})
            seeds.setdefault(run.seed, []).append(point)
    # A line needs two points.
    usable = {
        name: [np.array(points) for points in seeds.values() if len(points) > 1]
        for name, seeds in families.items()
    }
    usable = {name: seeds for name, seeds in usable.items() if seeds}
    if not usable:
        return EqualKL([], {})
    every = [points[:, 0] for seeds in usable.values() for points in seeds]
    low, high = max(roots.min() for roots in every), min(roots.max() for roots in every)
    if low >= high:
        return EqualKL([], {})
    roots = low + (high - low) * np.array([0.25, 0.5, 0.75])
    answer = {
        name: estimate_curve(np.stack([at_equal_cost(p[:, 0], p[:, 1], roots) for p in seeds]))
        for name, seeds in usable.items()
    }
    return EqualKL([float(root**2) for root in roots], answer)


def _without_knobs(run: Run) -> Run:
    kept = {key: value for key, value in run.settings.items() if key not in KNOBS}
    return Run(run.path, run.status, run.seed, kept, run.columns, run.command, run.manifest)
