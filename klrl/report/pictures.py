"""Draws the charts with matplotlib: as SVG for the page, and as PNG and SVG files next to it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

from klrl.base.digits import number
from klrl.base.files import replacing
from klrl.report.charts import Chart, Point
from klrl.report.measures import Line
from klrl.report.outcomes import label, seeds_text
from klrl.report.statistics import Estimate
from klrl.runs.curves import COLOURS

_SOFT, _GRID = "#737373", "#d8d8d8"
#: Colour in a chart -> its CSS variable in ``page.css``.
_NAMES = {each.lower(): f"var(--c{i})" for i, each in enumerate(COLOURS[:-1])} | {
    "#000000": "var(--ink)",
    "#ffffff": "var(--card)",
    _SOFT: "var(--soft)",
    _GRID: "var(--line)",
}
_LOOK = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "axes.unicode_minus": False,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "ytick.left": False,
    "lines.linewidth": 1.8,
    "legend.fontsize": 9.5,
    "text.parse_math": False,
}


class Look(NamedTuple):
    """Colour, line and marker of a setting, a group of runs that differ only in their seed."""

    colour: str
    line: str
    shape: str
    dashes: str  # ``line`` as SVG's stroke-dasharray, for the setting's check box
    glyph: str  # ``shape`` as a character, for the setting's check box


_KINDS = (
    ("-", "o", "", "●"),
    ("--", "s", "8 4", "■"),
    (":", "^", "2 4", "▲"),
    ("-.", "D", "10 3 2 3", "◆"),
)


def look_of(i: int) -> Look:
    """Return the look of the i-th setting."""
    return Look(COLOURS[i % len(COLOURS)], *_KINDS[i // len(COLOURS) % len(_KINDS)])


def boxes(lines: Sequence[Line], shown: Sequence[int]) -> list[dict[str, Any]]:
    """Make the settings' check boxes: first those of the settings in ``shown``."""
    looks = [
        {"i": i, "name": label(line), "ink": _NAMES[look_of(i).colour.lower()], "look": look_of(i)}
        for i, line in enumerate(lines)
    ]
    return sorted(looks, key=lambda each: each["i"] not in shown)


@dataclass(frozen=True)
class Drawing:
    """A drawn chart of the page."""

    key: str
    title: str
    description: str  # text for screen readers
    svg: Markup  # contents of the svg element
    box: str  # viewBox of the svg element
    data: dict[str, Any]  # for ``page.js``: position and text of each point


def draw_chart(chart: Chart, key: str) -> Drawing:
    """Draw a chart for the page with all settings; ``page.js`` hides the unchecked settings.

    Each element of setting i has the attribute ``data-s="i"``, and a class such as ``mean``.
    """
    with _figure((5.2, 3.2), key) as figure:
        axes = figure.subplots()
        _draw(axes, chart, range(len(chart.lines)))
        svg = _inline(figure)
    description = f"{chart.title}: {chart.y} against {chart.x}, {len(chart.series)} settings"
    series = [
        {"i": i, "name": label(chart.lines[i]), "points": _tooltips(axes, chart, i, points)}
        for i, points in chart.series.items()
        if points
    ]
    y = chart.y if chart.front is not None else f"{chart.title}, {chart.y}"
    data = {"x": f"{chart.x}: ", "y": f"{y}: ", "series": series}
    box = f"0 0 {figure.bbox.width:g} {figure.bbox.height:g}"
    return Drawing(key, chart.title, description, svg, box, data)


def draw_charts(charts: Sequence[Chart], shown: Sequence[int], stem: Path) -> list[str]:
    """Draw charts side by side into a PNG and an SVG at ``stem``; return the files' names.

    Args:
        charts: the charts to draw, of one task.
        shown: indices of the settings to draw; charts of return against KL draw all settings.
        stem: path of the files, without suffix.
    """
    columns = min(3, len(charts))
    rows, width = -(-len(charts) // columns), 4.6 * columns + 0.6
    names = {i: label(charts[0].lines[i]) for i in shown}
    size = (width, 3.5 * rows + 0.22 * -(-len(shown) // columns))
    with _figure(size, stem.name) as figure:
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, chart in zip(places, charts, strict=False):
            _draw(axes, chart, shown)
            axes.set_title(chart.title)
        for axes in places[len(charts) :]:
            axes.set_axis_off()
        marks = []
        for i, name in names.items():
            colour, line, shape, *_ = look_of(i)
            marks.append(Line2D([], [], label=name, color=colour, linestyle=line, marker=shape))
        figure.legend(handles=marks, ncols=columns, loc="outside lower center", frameon=False)
        _lay_out(figure)
        files = [f"{stem.name}.{kind}" for kind in ("png", "svg")]
        for name in files:
            with replacing(stem.with_name(name)) as partial:
                figure.savefig(partial, dpi=130, metadata={"Date": None} if "svg" in name else None)
        return files


# ----------------------------------------------------------------------------------------- figures


@contextmanager
def _figure(size: tuple[float, float], key: str) -> Iterator[Any]:
    """Make a figure; ``size`` is in inches, ``key`` makes the ids of SVG elements reproducible."""
    with matplotlib.rc_context({**_LOOK, "svg.hashsalt": key}):
        yield Figure(figsize=size, dpi=72)


def _lay_out(figure: Any) -> None:
    """Compute the layout once; otherwise each save would draw everything twice."""
    figure.set_layout_engine("constrained")
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")


def _inline(figure: Any) -> Markup:
    """Convert a figure to SVG without ids, and without the inline styles that the page forbids."""
    _lay_out(figure)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.canvas.print_figure(file, format="svg")
    text = file.getvalue()
    text = text[text.index("<g ") : text.rindex("</svg>")]
    # Change only tags: between them are names of settings, which may look like attributes.
    return Markup(re.sub(r">\s+<", "><", re.sub("<[^>]+>", _tag, text)))


def _tag(tag: re.Match[str]) -> str:
    text = re.sub(r' style="([^"]*)"', _attributes, tag[0])
    text = re.sub(r' id="s(\d+) (\w+)"', r' class="\2" data-s="\1"', text)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    # Two decimals of a pixel are enough.
    return re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+|\n", r"\1", d[0]), text)


def _attributes(style: re.Match[str]) -> str:
    """Convert style declarations to attributes, with the page's colours and font."""
    pairs = (each.split(": ", 1) for each in style[1].split("; "))
    kept = ((k, _NAMES.get(v, v)) for k, v in pairs if k not in ("font", "font-family"))
    return "".join(f' {name}="{value}"' for name, value in kept)


class _Short(EngFormatter):
    """Formats 10,000 as 10k and two million as 2M; leaves small numbers unchanged."""

    ENG_PREFIXES = {0: "", 3: "k", 6: "M", 9: "G"}  # noqa: RUF012


# ------------------------------------------------------------------------------------------ charts


def _ends(chart: Chart, i: int) -> list[float | None]:
    """Return the x at which each run of a setting failed; None for a run that did not fail."""
    return [run.end if run.failed else None for run in chart.lines[i].setting.runs]


def _tooltips(axes: Any, chart: Chart, i: int, points: Sequence[Point]) -> list[list[Any]]:
    """Return each point's position, the text of its x, and the text of its y and seeds."""
    finished, tooltips = seeds_text(chart.lines[i].setting), []
    of_x, of_y = chart.digits
    at = axes.transData.transform([(point.x, point.y.value) for point in points])
    at = np.clip(np.nan_to_num(at), axes.bbox.min, axes.bbox.max)
    at[:, 1] = axes.figure.bbox.height - at[:, 1]  # in SVG, y grows downwards
    for point, place in zip(points, at.round(1).tolist(), strict=True):
        x = _span(point.across, of_x) if point.across else number(point.x, of_x)
        n = f"{point.y.seeds} seeds"
        what = f"range of {n}" if point.y.low is None else f"95 % interval over {n}"
        what = "1 seed" if point.y.seeds == 1 else what
        what += f"; {finished} finished" if "of" in finished else ""
        tooltips.append([*place, x, f"{_span(point.y, of_y)}\n{what}"])
    return tooltips


def _span(of: Estimate, digits: int) -> str:
    """Format a value with its interval or, if there is none, with the range of the seeds."""
    ends = _interval(of) or [of.least, of.most]
    value, low, high = (number(each, digits) for each in (of.value, *ends))
    return value if of.seeds == 1 else f"{value} ({low} to {high})"


def _draw(axes: Any, chart: Chart, shown: Sequence[int]) -> None:
    for i, points in chart.series.items():
        if points and chart.front is not None:
            _draw_point(axes, chart, i, points[0], faint=i not in shown)
        elif points and i in shown:
            _draw_line(axes, chart, i, points)
    for each in (*axes.lines, *axes.collections):
        each.set_in_layout(False)  # otherwise, the layout is slow: it visits every point
    log = chart.log and bool(axes.lines)
    axes.set(xlabel=chart.x, ylabel=f"{chart.y} (log)" if log else chart.y)
    axes.xaxis.set_major_formatter(_Short(sep=""))
    axes.yaxis.set_major_formatter(_Short(sep=""))
    if log:
        _log_axis(axes, chart.floor)
    if chart.front is None:
        axes.set_xlim(left=0)
        return
    joined = [point for i in chart.front for point in chart.series.get(i, ())]
    x, y = [point.x for point in joined], [point.y.value for point in joined]
    axes.plot(x, y, color=_SOFT, linestyle=":", zorder=0)
    # sqrt(KL) is never negative, but a mark at 0 needs a margin.
    low, high = axes.get_xlim()
    axes.set_xlim(left=max(low, -0.04 * high))


def _log_axis(axes: Any, floor: float | None) -> None:
    """Make the y-axis logarithmic, with plain numbers: 0.02, not 2 x 10^-2."""
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    if floor and low < floor:
        low, high = axes.set_ylim(bottom=floor)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_point(axes: Any, chart: Chart, i: int, point: Point, *, faint: bool) -> None:
    """Draw a setting's seeds, their mean, and its intervals in return and in sqrt(KL)."""
    assert chart.front is not None
    look, alpha = look_of(i), 0.35 if faint else 1.0
    failed = np.array([bad is not None for bad in _ends(chart, i)])
    at = np.array([point.places, point.seeds])
    for of, shape, size, kind in ((~failed, look.shape, 3, "dot"), (failed, "x", 5, "failed")):
        if of.any():
            ink = {"color": look.colour, "alpha": 0.5 * alpha, "gid": f"s{i} {kind}"}
            axes.plot(*at[:, of], shape, markersize=size, **ink)
    x, y = point.x, point.y.value
    bars = {"up": ([x, x], _interval(point.y)), "across": (_interval(point.across), [y, y])}
    for kind, (of_x, of_y) in bars.items():
        if of_x and of_y:
            axes.plot(of_x, of_y, color=look.colour, alpha=alpha, gid=f"s{i} {kind}")
    face = look.colour if i in chart.front else "white"
    mark = {"color": look.colour, "markerfacecolor": face, "markersize": 7, "alpha": alpha}
    axes.plot(x, y, look.shape, gid=f"s{i} point", **mark)


def _interval(of: Estimate | None) -> list[float]:
    """Return both ends of an estimate's interval; [] with too few seeds."""
    return [] if of is None or of.low is None or of.high is None else [of.low, of.high]


def _draw_line(axes: Any, chart: Chart, i: int, points: Sequence[Point]) -> None:
    """Draw a setting's mean, interval and seeds; on a log axis, make the interval positive."""
    x = np.array([point.x for point in points])
    middle, low, high = np.array([[p.y.value, p.y.low, p.y.high] for p in points], float).T
    seeds = np.array([point.seeds for point in points], float).T
    if chart.log:
        low = np.where(low <= 0, np.min([*middle, *low[low > 0]]), low)
    look, at, one = look_of(i), f"s{i}", len(x) == 1
    ink, thin = {"color": look.colour}, {"alpha": 0.3, "linewidth": 0.7, "gid": f"{at} seed"}
    ends: dict[str, list[tuple[float, float]]] = {"dot": [], "failed": []}
    for k, bad in enumerate(_ends(chart, i)):
        if bad is not None:  # values after a failure count in the mean, but are not drawn
            seeds[k, int(np.searchsorted(x, bad)) + 1 :] = np.nan
        last = np.flatnonzero(np.isfinite(seeds[k]))[-1:]
        ends["dot" if bad is None else "failed"].extend((x[j], seeds[k, j]) for j in last)
    if chart.result:
        breaks = np.full((len(seeds), 1), np.nan)  # NaN separates the seeds within one line
        every = np.tile([*x, np.nan], len(seeds)), np.hstack([seeds, breaks]).ravel()
        axes.plot(*every, marker="." if one else None, **ink, **thin)
    elif ends["dot"]:
        axes.plot(*zip(*ends["dot"], strict=True), ".", alpha=0.5, gid=f"{at} dot", **ink)
    if ends["failed"]:
        axes.plot(*zip(*ends["failed"], strict=True), "x", markersize=5, gid=f"{at} failed", **ink)
    axes.plot(x, middle, look.line, marker=look.shape if one else None, gid=f"{at} mean", **ink)
    if np.isfinite(low).any():
        band = {"color": look.colour, "alpha": 0.15, "linewidth": 0, "gid": f"{at} band"}
        axes.fill_between(x, low, high, **band)
