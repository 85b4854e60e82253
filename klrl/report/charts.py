"""The charts as plain data, drawn both on the page and in the PNGs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from klrl.report.curves import curve
from klrl.report.frontier import frontier
from klrl.report.measures import compared_by, kl_metric, reward_metric
from klrl.report.settings import Setting
from klrl.report.statistics import Estimate
from klrl.report.summary import Line, line_value
from klrl.runs.metrics import PANELS, Metric, heading, metric_of, metrics_of

#: Settings drawn at first: more cannot be told apart in a chart. On the page the reader can choose.
SHOWN = 7


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
    series = {}
    for i, setting in enumerate(settings):
        learned = curve(setting, metric)
        if learned:
            pairs = zip(learned.x, learned.y, strict=True)
            series[i] = [Point(x, y) for x, y in pairs if y is not None]
    return {i: points for i, points in series.items() if points}


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
