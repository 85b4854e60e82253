"""The charts of the page as pictures, PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from klrl.base.files import replacing
from klrl.report.aggregate import Aggregate
from klrl.report.charts import Chart, Point
from klrl.report.dots import axis_title, title, told_apart
from klrl.report.statistics import Array, Estimate
from klrl.runs.curves import COLOURS

#: When the colours run out, line styles and markers tell settings apart, as on the page.
_LINES = ("-", "--", ":", "-.")
_SHAPES = ("o", "s", "^", "D")
_LOOK = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.8,
    "legend.fontsize": 9.5,
}


def draw_charts(
    charts: Sequence[Chart],
    names: Sequence[str],
    failed: Sequence[Sequence[float | None]],
    shown: Sequence[int],
    stem: Path,
) -> list[str]:
    """Draw charts side by side into a PNG and an SVG at ``stem``; returns their names.

    Args:
        charts: those to draw.
        names: the settings' names.
        failed: of each setting, where each of its runs failed; None if it did not.
        shown: indices of the settings to draw; return against KL draws all.
        stem: the pictures' path, without suffix.
    """
    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    width = 4.6 * columns + 0.6
    in_row = _legend_columns([names[i] for i in shown], width)
    size = (width, 3.5 * rows + 0.22 * -(-len(shown) // in_row))
    with _figure(size, stem) as figure:
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, chart in zip(places, charts, strict=False):
            _draw(axes, chart, names, failed, shown)
        for axes in places[len(charts) :]:
            axes.set_axis_off()
        _add_legend(figure, places, in_row)
    return _names(stem)


def draw_tasks(
    settings: Sequence[Aggregate], tasks: Sequence[str], score: str, stem: Path
) -> list[str]:
    """Draw the settings over all tasks into a PNG and an SVG at ``stem``; returns their names."""
    apart = told_apart(tasks)
    in_row = _legend_columns(["mean and 95 % interval", *tasks], 6.5) if apart else 2
    legend_rows = -(-(1 + len(tasks) * apart) // in_row)
    size = (6.5, 1.1 + 0.34 * len(settings) + 0.24 * legend_rows)
    with _figure(size, stem) as figure:
        axes = figure.subplots()
        mean = [each.mean for each in settings]
        axes.errorbar(
            [each.value for each in mean],
            range(len(mean)),
            xerr=np.transpose([[m.value - m.low, m.high - m.value] for m in mean]),
            fmt="o",
            markersize=7.5,
            color=COLOURS[0],
            label="mean and 95 % interval" if any(m.low == m.low for m in mean) else "mean",
        )
        for i, task in enumerate(tasks):
            label, shape = (task, _SHAPES[i]) if apart else ("means of the tasks", "o")
            x = [each.task_means[i] for each in settings]
            # A little lower, so that no mean hides one.
            y = np.arange(len(x)) + 0.22
            axes.plot(x, y, shape, color="0.45", markersize=4.5, label=label)
        axes.set(title=title(score), xlabel=axis_title(score), ylim=(len(mean) - 0.5, -0.5))
        axes.set_yticks(range(len(mean)), [each.name for each in settings])
        axes.grid(visible=False, axis="y")
        _add_legend(figure, [axes], in_row)
    return _names(stem)


@contextmanager
def _figure(size: tuple[float, float], stem: Path) -> Iterator[Any]:
    """A figure of this size in inches, which is saved when all is drawn."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Numbers of a figure's elements that do not change from one report to the next.
    look = {**_LOOK, "svg.hashsalt": stem.name}
    with matplotlib.rc_context(look):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        png, svg = (stem.with_name(name) for name in _names(stem))
        with replacing(png) as partial:
            figure.savefig(partial, dpi=130)
        # All is in its place by now.
        figure.set_layout_engine("none")
        with replacing(svg) as partial:
            figure.savefig(partial, metadata={"Date": None})


def _names(stem: Path) -> list[str]:
    return [f"{stem.name}.{kind}" for kind in ("png", "svg")]


def _legend_columns(names: Sequence[str], width: float) -> int:
    """How many names stand side by side; a letter is about 0.08 inches wide, a mark four."""
    return max(1, min(len(names), int(width / 0.08 / (max(map(len, names)) + 6))))


def _add_legend(figure: Any, places: Iterable[Any], in_row: int) -> None:
    handles: dict[str, Any] = {}
    for axes in places:
        handles |= {
            label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    if handles:
        below = {"loc": "outside lower center", "frameon": False, "ncols": in_row}
        figure.legend(handles.values(), handles.keys(), **below)


def _draw(
    axes: Any,
    chart: Chart,
    names: Sequence[str],
    failed: Sequence[Sequence[float | None]],
    shown: Sequence[int],
) -> None:
    for i, points in chart.series.items():
        label = names[i] if i in shown else None
        if chart.front is not None:
            _draw_point(axes, i, points[0], failed[i], label, filled=i in chart.front)
        elif i in shown:
            _draw_line(axes, chart, i, points, failed[i], label)
    if chart.front:
        joined = [
            (chart.series[i][0].x, chart.series[i][0].y.value)
            for i in chart.front
            if i in chart.series
        ]
        axes.plot(*zip(*joined, strict=True), color="0.5", linestyle=":", zorder=0)
    log = chart.log and bool(axes.lines)
    axes.set(title=chart.title, xlabel=chart.x, ylabel=f"{chart.y} (log)" if log else chart.y)
    if log:
        _log_axis(axes, chart.floor)
    else:
        axes.yaxis.set_major_formatter(_thousands())
    if chart.front is None:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(_thousands())


def _thousands() -> Any:
    """10k for 10,000 and 2M for two million; small numbers as they are."""
    from matplotlib.ticker import FuncFormatter

    def name(value: float, _: object) -> str:
        if abs(value) >= 1e6:
            return f"{value / 1e6:g}M"
        return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"

    return FuncFormatter(name)


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


def _draw_point(
    axes: Any,
    i: int,
    point: Point,
    failed: Sequence[float | None],
    label: str | None,
    *,
    filled: bool,
) -> None:
    """A setting against KL: its seeds, and the intervals of its mean return and mean root of KL."""
    colour = COLOURS[i % len(COLOURS)]
    shape = _SHAPES[i // len(COLOURS) % len(_SHAPES)]
    faint = 1.0 if label else 0.35
    for x, y, bad in zip(point.places, point.seeds, failed, strict=True):
        look = {"marker": shape, "markersize": 3}
        if bad is not None:
            look = {"marker": "x", "markersize": 5}
        axes.plot(x, y, color=colour, alpha=0.5 * faint, linestyle="", **look)
    style = {"color": colour, "markerfacecolor": colour if filled else "white", "label": label}
    axes.errorbar(
        [point.x],
        [point.y.value],
        yerr=_spread(point.y),
        xerr=_spread(point.across) if point.across else None,
        fmt=shape,
        markersize=7,
        alpha=faint,
        **style,
    )


def _spread(estimate: Estimate) -> list[list[float]] | None:
    """The interval's lengths below and above the value, in matplotlib's form [[below], [above]]."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[estimate.value - estimate.low], [estimate.high - estimate.value]]


def _draw_line(
    axes: Any,
    chart: Chart,
    i: int,
    points: Sequence[Point],
    failed: Sequence[float | None],
    label: str | None,
) -> None:
    """A setting's learning curve, its interval and its seeds; a log axis has no values <= 0."""
    points = [point for point in points if not chart.log or point.y.value > 0]
    if not points:
        return
    x = [point.x for point in points]
    middle, low, high = (
        np.array([getattr(point.y, end) for point in points], float)
        for end in ("value", "low", "high")
    )
    seeds = np.array([point.seeds for point in points], float).T
    if chart.log:
        low = np.maximum(low, middle.min())
        seeds = np.where(seeds > 0, seeds, np.nan)
    colour = COLOURS[i % len(COLOURS)]
    for values, bad in zip(seeds, failed, strict=True):
        if chart.result:
            _draw_seed(axes, x, values, bad, colour)
        elif np.isfinite(values).any():
            last = np.flatnonzero(np.isfinite(values))[-1]
            mark = {"marker": "." if bad is None else "x", "markersize": 5, "alpha": 0.5}
            axes.plot(x[last], values[last], color=colour, **mark)
    line = _LINES[i // len(COLOURS) % len(_LINES)]
    axes.plot(x, middle, line, marker="o" if len(x) == 1 else None, color=colour, label=label)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_seed(
    axes: Any, x: Sequence[float], values: Array, bad: float | None, colour: str
) -> None:
    """A run's thin line; a cross where it failed, and broken from there on: what it counts as."""
    look: dict[str, Any] = {"color": colour, "alpha": 0.3, "linewidth": 0.7}
    if bad is None:
        axes.plot(x, values, marker="." if len(x) == 1 else None, **look)
        return
    live = int(np.searchsorted(x, bad)) + 1
    axes.plot(x[:live], values[:live], **look)
    axes.plot(x[live - 1 :], values[live - 1 :], ":", **look)
    axes.plot(x[live - 1 : live], values[live - 1 : live], "x", color=colour, markersize=5)
