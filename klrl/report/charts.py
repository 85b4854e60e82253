"""The charts as plain data, drawn both on the page and in the PNGs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klrl.report.frontier import frontier
from klrl.report.measures import Line, column, compared_by, kl_metric, line_value, reward_metric
from klrl.report.runs import Run
from klrl.report.settings import Setting
from klrl.report.statistics import Estimate, estimate_curve
from klrl.runs.metrics import PANELS, Metric, heading, metric_of, metrics_of

#: Settings drawn at first: more cannot be told apart in a chart. On the page the reader can choose.
SHOWN = 7
#: A curve has no more points than this; rows between two points are averaged.
POINTS = 60


class Point(NamedTuple):
    """One point of a chart.

    Attributes:
        x: its position.
        y: the estimate there.
        across: on a frontier, the estimate of x.
    """

    x: float
    y: Estimate
    across: Estimate | None = None


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        x: label of the x-axis, with its unit.
        y: label of the y-axis, with its unit.
        digits: significant digits of x and of y, see :func:`klrl.runs.metrics.number`.
        log: whether y is logarithmic; values <= 0 are left out.
        series: index of the setting -> its points by x.
        front: indices of the settings on the Pareto front, by x; None for learning curves.
        floor: the lowest start of a logarithmic axis; None to show everything.
    """

    title: str
    x: str
    y: str
    digits: tuple[int, int]
    log: bool
    series: dict[int, list[Point]]
    front: list[int] | None = None
    floor: float | None = None


# ---------------------------------------------------------------------------------- learning curves


def learning_curves(settings: Sequence[Setting]) -> list[Chart]:
    """A chart for each metric that declares a panel and has data, against the axis."""
    runs = [run for setting in settings for run in setting.runs]
    domain = runs[0].domain
    axis = metric_of(domain.axis, domain)
    charts = []
    for declared in metrics_of(domain).values():
        if declared.panel is None:
            continue
        metric = metric_of(compared_by(runs, declared.name), domain)
        log, series = PANELS[declared.panel].log, _series(settings, metric.name)
        floor = _floor(series) if log else None
        title, digits = heading(metric.title), _digits(axis, metric)
        charts.append(Chart(title, axis.title, metric.unit, digits, log, series, floor=floor))
    return [chart for chart in charts if chart.series]


def _digits(x: Metric, y: Metric) -> tuple[int, int]:
    assert x.digits is not None
    assert y.digits is not None
    return x.digits, y.digits


def _floor(series: Mapping[int, Sequence[Point]]) -> float | None:
    """A tenth of the tenth percentile, as the lowest start of a logarithmic axis.

    The KL to the reference starts at rounding error, 1e-9; an axis from there would flatten the
    rest.
    """
    values = [point.y.value for points in series.values() for point in points if point.y.value > 0]
    return float(np.quantile(values, 0.1)) / 10 if values else None


def _series(settings: Sequence[Setting], metric: str) -> dict[int, list[Point]]:
    curves = {i: curve(setting, metric) for i, setting in enumerate(settings)}
    return {i: points for i, points in curves.items() if points}


def curve(setting: Setting, metric: str) -> list[Point]:
    """IQM and interval over seeds along the x-axis; empty if no seed recorded the metric.

    At each point a seed has the mean of its rows since the point before, or else its last value. A
    seed that ended earlier is left out.
    """
    runs = [run for run in setting.runs if metric in run.columns]
    if not runs:
        return []
    grid = _grid(runs, metric)
    seeds = np.stack([_at(grid, column(run, run.axis), column(run, metric)) for run in runs])
    pairs = zip(grid, estimate_curve(seeds), strict=True)
    return [Point(float(x), y) for x, y in pairs if y is not None]


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


# ---------------------------------------------------------------------------------------- frontiers


def frontier_charts(lines: Sequence[Line]) -> list[Chart]:
    """Final reward against sqrt(KL(policy||reference)), and the gold score if it was recorded.

    A reward that is not the gold score is a proxy. It is over-optimised where the gold score falls
    with growing KL while the reward still rises. The x-axis is that of Gao, Schulman and Hilton
    2022, "Scaling laws for reward model overoptimization".
    """
    runs = [run for line in lines for run in line.setting.runs]
    charts = [_frontier_chart(lines, "return", "Reward", reward_metric(runs))]
    if any(line.estimates.get("gold") for line in lines):
        charts.append(_frontier_chart(lines, "gold", "Gold score", "reward/gold"))
    return charts


def _frontier_chart(lines: Sequence[Line], key: str, what: str, name: str) -> Chart:
    """A metric's measure against sqrt(KL(policy||reference)), one point per setting."""
    runs = [run for line in lines for run in line.setting.runs]
    of_y, of_x = (metric_of(each, runs[0].domain) for each in (name, kl_metric(runs)))
    points: dict[int, list[Point]] = {}
    for i, line in enumerate(lines):
        gain, kl = line.estimates[key], line.estimates["kl_ref"]
        if gain and kl:
            root = _root(kl)
            points[i] = [Point(root.value, gain, root)]
    return Chart(
        f"{what} against sqrt(KL(policy||reference))",
        f"sqrt(KL(policy||reference)), KL in {of_x.unit}",
        f"final {of_y.unit}",
        _digits(of_x, of_y),
        False,
        points,
        frontier(lines, key),
    )


def _root(kl: Estimate) -> Estimate:
    """The square root of an estimate and of both ends of its interval.

    The root is monotonic, so percentiles of the KL become percentiles of its root. A sampled KL
    below 0 counts as 0.
    """
    value, low, high = (
        None if end is None else max(end, 0.0) ** 0.5 for end in (kl.value, kl.low, kl.high)
    )
    assert value is not None
    return Estimate(value, low, high, kl.seeds)


def first_shown(lines: Sequence[Line]) -> list[int]:
    """The settings drawn at first: all, or the :data:`SHOWN` with the highest final reward."""
    order = sorted(range(len(lines)), key=lambda i: -_or_least(line_value(lines[i], "return")))
    return sorted(order[:SHOWN])


def _or_least(value: float) -> float:
    return value if value == value else float("-inf")
