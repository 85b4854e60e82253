"""The charts of the page as PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from klrl.report.charts import Chart, Point
from klrl.report.statistics import Estimate
from klrl.runs.curves import COLOURS

#: When the colours run out, line styles and markers tell settings apart, as on the page.
_LINES = ("-", "--", ":", "-.")
_SHAPES = ("o", "s", "^", "D")


def draw_charts(
    charts: Sequence[Chart], names: Sequence[str], shown: Sequence[int], path: Path
) -> None:
    """Draw charts side by side into a PNG.

    Args:
        charts: those to draw.
        names: the settings' names.
        shown: indices of the settings to draw; a frontier draws all.
        path: the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(
        figsize=(5.2 * columns + 0.8, 3.7 * rows + 0.3 * len(shown)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, chart in zip(places, charts, strict=False):
        _draw(axes, chart, names, shown)
    for axes in places[len(charts) :]:
        axes.set_axis_off()
    handles: dict[str, Any] = {}
    for axes in places:
        handles |= {
            label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", fontsize=9)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, chart: Chart, names: Sequence[str], shown: Sequence[int]) -> None:
    for i, points in chart.series.items():
        label = names[i] if i in shown else None
        if chart.front is not None:
            _draw_point(axes, i, points[0], label, filled=i in chart.front)
        elif i in shown:
            _draw_line(axes, chart, i, points, label)
    if chart.front:
        joined = [(chart.series[i][0].x, chart.series[i][0].y.value) for i in chart.front]
        axes.plot(*zip(*joined, strict=True), color="grey", linestyle=":", zorder=0)
    log = chart.log and bool(axes.lines)
    axes.set(title=chart.title, xlabel=chart.x, ylabel=f"{chart.y} (log)" if log else chart.y)
    if log:
        _log_axis(axes, chart.floor)
    axes.grid(alpha=0.3)


def _log_axis(axes: Any, floor: float | None) -> None:
    """Make the y-axis logarithmic, with plain numbers: 0.02, not 2 x 10^-2."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if floor and low < floor:
        axes.set_ylim(bottom=floor)
    subs = (1.0, 2.0, 5.0) if high < 300 * axes.get_ylim()[0] else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_point(axes: Any, i: int, point: Point, label: str | None, *, filled: bool) -> None:
    """A setting on the frontier, with the intervals of its reward and of its KL."""
    colour = COLOURS[i % len(COLOURS)]
    style = {"color": colour, "markerfacecolor": colour if filled else "white", "label": label}
    axes.errorbar(
        [point.x],
        [point.y.value],
        yerr=_spread(point.y),
        xerr=_spread(point.across) if point.across else None,
        fmt=_SHAPES[i // len(COLOURS) % len(_SHAPES)],
        alpha=1.0 if label else 0.35,
        **style,
    )


def _spread(estimate: Estimate) -> list[list[float]] | None:
    """The interval's lengths below and above the value, in matplotlib's form [[below], [above]]."""
    if estimate.low is None or estimate.high is None:
        return None
    # A percentile interval may exclude its value; matplotlib refuses a negative length.
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    return [[max(below, 0.0)], [max(above, 0.0)]]


def _draw_line(axes: Any, chart: Chart, i: int, points: Sequence[Point], label: str | None) -> None:
    """A setting's learning curve and its interval; a logarithmic axis leaves out values <= 0."""
    points = [point for point in points if not chart.log or point.y.value > 0]
    if not points:
        return
    x = [point.x for point in points]
    middle, low, high = (
        np.array([getattr(point.y, end) for point in points], float)
        for end in ("value", "low", "high")
    )
    if chart.log:
        low = np.maximum(low, middle.min())
    style = {"color": COLOURS[i % len(COLOURS)], "label": label}
    line = _LINES[i // len(COLOURS) % len(_LINES)]
    axes.plot(x, middle, line, marker="o" if len(x) == 1 else None, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
