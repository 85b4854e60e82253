"""Computes the report's charts as plain data; ``pictures.py`` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klrl.report.differences import Difference, front
from klrl.report.measures import (
    SCORES,
    Line,
    column,
    compared_by,
    final,
    kl_metric,
    line_value,
    measures,
    reward_metric,
)
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.report.statistics import Estimate, estimate, estimate_curve
from klrl.runs.metrics import PANELS, Metric, heading, metric_of, metrics_of

#: At first, the page draws this many settings (groups of runs that differ only in their seed).
SHOWN = 7
#: A curve has at most about this many points; each point averages the rows since the previous one.
POINTS = 60
#: A point with a number above this is not drawn: matplotlib's arithmetic would overflow.
MOST = 1e100
#: Significant digits of the values that the page shows for a point.
DIGITS = 3


class Point(NamedTuple):
    """One point of a chart."""

    x: float
    y: Estimate
    seeds: Sequence[float] = ()  # y of each run of the setting; NaN for a run without a value
    across: Estimate | None = None  # the estimate of x; only in charts of return against KL
    places: Sequence[float] = ()  # x of each run; only in charts of return against KL


@dataclass(frozen=True)
class Chart:
    """The data of a chart."""

    title: str
    x: str  # label of the x-axis, with its unit
    y: str  # label of the y-axis, with its unit
    digits: Sequence[int]  # significant digits of x and of y
    lines: Sequence[Line]  # one per setting of the task
    series: dict[int, list[Point]]  # index of a setting in ``lines`` -> its points, by x
    log: bool = False  # True if the y-axis is logarithmic; then points with y <= 0 are left out
    front: list[int] | None = None  # the Pareto front's settings, by x; None for learning curves
    result: bool = True  # False if the page shows the chart only under "More"

    @property
    def missing(self) -> list[str]:
        """Names of the settings that have values, but none that can be drawn."""
        return [self.lines[i].setting.name for i, points in self.series.items() if not points]

    @property
    def floor(self) -> float | None:
        """Lower limit of a log axis, chosen to hide KLs that are only rounding errors."""
        values = [point.y.value for points in self.series.values() for point in points]
        return float(np.quantile(values, 0.1)) / 10 if values else None


# ---------------------------------------------------------------------------------- learning curves


def learning_curves(lines: Sequence[Line]) -> list[Chart]:
    """Make a chart for each metric that has a panel and data; scores come first."""
    runs = [run for line in lines for run in line.setting.runs]
    domain = runs[0].domain
    axis = metric_of(domain.axis, domain)
    scores = {each.metric.name: each.key for each in measures(runs) if each.key in SCORES}
    charts = []
    for declared in metrics_of(domain).values():
        if declared.panel is None:
            continue
        metric = metric_of(compared_by(runs, declared.name), domain)
        log, result = PANELS[declared.panel].log, declared.panel == "score"
        series = _series(lines, metric.name, scores.get(metric.name), log=log)
        title, digits = _title(metric), _digits(axis, metric)
        if series:
            chart = Chart(title, axis.title, metric.unit, digits, lines, series, log, result=result)
            charts.append(chart)
    return sorted(charts, key=lambda chart: not chart.result)


def _title(metric: Metric) -> str:
    """Return a metric's title; append "per token" or "per response" to a language run's KL."""
    what, _, per = metric.unit.partition(" per ")
    which = f" per {per}" if what == "nats" and per in ("token", "response") else ""
    return heading(metric.title) + which


def _digits(*of: Metric) -> list[int]:
    """Return each metric's significant digits, at most :data:`DIGITS`; 0 for whole numbers."""
    return [DIGITS if each.digits is None else min(each.digits, DIGITS) for each in of]


def _series(
    lines: Sequence[Line], metric: str, key: str | None, *, log: bool
) -> dict[int, list[Point]]:
    """Map a setting's index to its points that can be drawn; skip settings without the metric.

    If ``metric`` is a score, ``key`` is its measure.
    """
    ends = [_ends(line, metric, key) for line in lines]
    curves = {i: curve(line.setting, metric, ends[i]) for i, line in enumerate(lines)}
    return {i: [p for p in of if _fits(p, log=log)] for i, of in curves.items() if of}


def _fits(point: Point, *, log: bool = False) -> bool:
    ends = [point.x, point.y.value, point.y.low, point.y.high]
    numbers = np.array([*ends, *point.seeds, *point.places], float)
    return not (np.abs(numbers) > MOST).any() and (not log or point.y.value > 0)


def _ends(line: Line, metric: str, key: str | None) -> list[float]:
    """For each run, return its value in the curve after it failed; NaN if it did not fail."""
    runs = line.setting.runs
    values = line.values[key] if key else np.array([final(run, metric) for run in runs])
    return [float(value) if run.failed else np.nan for run, value in zip(runs, values, strict=True)]


def curve(setting: Setting, metric: str, ends: Sequence[float] | None = None) -> list[Point]:
    """Compute mean and interval over runs at points on the x-axis; [] if no run has the metric.

    Each run contributes the mean of its rows since the previous point or, if there are none, its
    previous mean. After its end, it contributes its value in ``ends`` or, if that is NaN, nothing.
    """
    runs = [run for run in setting.runs if metric in run.columns]
    if not runs:
        return []
    grid = _grid(runs, metric)
    at = ((column(run, run.axis), column(run, metric)) for run in setting.runs)
    seeds = np.stack([_at(grid, x, y) for x, y in at])
    if ends is not None:
        after = grid > np.array([run.end for run in setting.runs])[:, None]
        seeds = np.where(after & np.isnan(seeds), np.asarray(ends, float)[:, None], seeds)
    columns = zip(grid, estimate_curve(seeds), seeds.T.tolist(), strict=True)
    return [Point(float(x), y, each) for x, y, each in columns if y is not None]


def _grid(runs: Sequence[ReadRun], metric: str) -> NDArray[np.float64]:
    """Choose points among the x of the run with the most values; append the largest of all x."""
    places = [column(run, run.axis)[np.isfinite(column(run, metric))] for run in runs]
    x = max(places, key=len)
    every = -(-len(x) // POINTS) or 1
    x = x[::-1][::every][::-1]
    end = max((place[-1] for place in places if len(place)), default=-np.inf)
    return np.append(x, end) if len(x) and end > x[-1] else x


def _at(
    grid: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
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


# ------------------------------------------------------------------------------- return against KL


def against_kl(
    lines: Sequence[Line], differences: Mapping[str, Sequence[Difference]]
) -> list[Chart]:
    """Chart the final return against sqrt(KL(policy||reference)), in training and in evaluations.

    If a gold score was recorded, chart it, too: the training reward is then a proxy, and is
    over-optimised where the gold score falls while KL and reward rise. The x-axis is that of Gao,
    Schulman and Hilton 2022, "Scaling laws for reward model overoptimization".
    """
    runs = [run for line in lines for run in line.setting.runs]
    domain, of_kl = runs[0].domain, ("kl_ref", kl_metric(runs))
    drawn = [("return", domain.score, reward_metric(runs), *of_kl)]
    if any(line.estimates.get("gold") for line in lines):
        drawn.append(("gold", "gold score", "reward/gold", *of_kl))
    if any(line.estimates.get("eval_kl") for line in lines):
        evaluated = f"{domain.evaluation} {domain.score}"
        drawn.append(("eval_return", evaluated, "eval/return", "eval_kl", "eval/kl_ref"))
    return [_against_kl(lines, differences, *each) for each in drawn]


def _against_kl(
    lines: Sequence[Line],
    differences: Mapping[str, Sequence[Difference]],
    key: str,
    what: str,
    name: str,
    kl: str,
    kl_name: str,
) -> Chart:
    """Chart the measure ``key`` against the square root of ``kl``; each setting is one point."""
    of_y, of_x = (metric_of(each, lines[0].setting.runs[0].domain) for each in (name, kl_name))
    points: dict[int, list[Point]] = {}
    for i, line in enumerate(lines):
        # A KL estimated from samples may be negative; it counts as 0.
        roots = np.sqrt(np.maximum(line.values[kl], 0.0))
        gain, root = line.estimates[key], estimate(roots)
        if gain and root:
            seeds, places = line.values[key].tolist(), roots.tolist()
            point = Point(root.value, gain, seeds, root, places)
            points[i] = [point] if _fits(point) else []
    return Chart(
        f"{heading(what)} against sqrt(KL(policy||reference))",
        f"sqrt(KL(policy||reference)), KL in {of_x.unit}",
        f"final {of_y.unit}",
        _digits(of_x, of_y),
        lines,
        points,
        front=front(lines, differences.get(key, ()), kl),
    )


def first_shown(lines: Sequence[Line]) -> list[int]:
    """Choose the settings drawn at first: the :data:`SHOWN` with the highest final returns."""
    returns = np.nan_to_num([line_value(line, "return") for line in lines], nan=-np.inf)
    return sorted(sorted(range(len(lines)), key=lambda i: -returns[i])[:SHOWN])
