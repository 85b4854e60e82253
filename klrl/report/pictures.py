"""Draws the report's charts with matplotlib, as SVG whose text stays text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from klrl.report.differences import Difference, front
from klrl.report.measures import MOST, curve, kl_metric, reward_metric
from klrl.report.settings import Setting
from klrl.report.statistics import Array, Estimate, estimate, estimate_curve
from klrl.runs.curves import COLOURS
from klrl.runs.metrics import PANELS, Metric, heading, metric_of, metrics_of

#: Width and height of a chart in points; the page makes it as wide as its column.
WIDTH, HEIGHT = 374, 230
#: The curves next to return against KL. The other scores are below; the page folds the rest.
_FIRST = ("reward/episode", "kl/ref/exact")
#: Matplotlib's settings; SVG and PDF keep text as text.
LOOK = {
    "font.size": 10,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": False,
    "axes.titlesize": 10,
    "grid.color": "#d8d8d8",
    "lines.scale_dashes": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "ytick.left": False,
}
#: Dashes and gaps in points. Of equal curves, each shows in the gaps of the later ones. Seven
#: colours and five kinds of dashes make 35 looks, with four markers 28.
_DASHES = ((1, 0), (7, 4), (2, 3), (8, 3, 2, 3), (12, 6))
_SHAPES = {"o": "●", "s": "■", "^": "▲", "D": "◆"}


class Look(NamedTuple):
    """Colour, dashes and marker of a setting, a group of runs that differ only in their seed."""

    colour: str
    dashes: tuple[int, ...]
    shape: str  # matplotlib's marker
    glyph: str  # the same as a character, for the setting's check box


def look_of(i: int) -> Look:
    """Return the look of the i-th setting."""
    shape = [*_SHAPES][i % len(_SHAPES)]
    return Look(COLOURS[i % len(COLOURS)], _DASHES[i % len(_DASHES)], shape, _SHAPES[shape])


class Drawing(NamedTuple):
    """A drawn chart."""

    kind: str  # "against" KL; a curve of _FIRST ("first"), of another "score", or "more"
    title: str
    what: str
    svg: Markup  # contents of an svg element; elements of setting i have the class ``s{i}``


def draw_charts(
    settings: Sequence[Setting], pairs: Mapping[Any, Sequence[Difference]], key: str
) -> list[Drawing]:
    """Draw return against KL, then the curves of each metric that has a panel and data.

    ``key`` makes the ids of the SVGs unique in the page, and equal for equal reports.
    """
    runs = [run for setting in settings for run in setting.runs]
    domain = runs[0].domain
    shared = dict(zip(_FIRST, (reward_metric(runs), kl_metric(runs)), strict=True))
    against = {"return": (domain.score, shared[_FIRST[0]]), "gold": ("gold score", "reward/gold")}
    kl = metric_of(shared[_FIRST[1]], domain)
    drawings = [
        _against_kl(f"{key}-{of}", settings, pairs[of], of, what, metric_of(name, domain), kl)
        for of, (what, name) in against.items()
        if any(setting.estimates.get(of) for setting in settings) or of == "return"
    ]
    declared = {n: m for n, m in metrics_of(domain).items() if m.panel and m.unless not in _FIRST}
    for name in sorted(declared, key=lambda name: name not in _FIRST):
        metric = metric_of(shared.get(name, name), domain)
        kind = "first" if name in _FIRST else "score" if declared[name].panel == "score" else "more"
        log = PANELS[str(declared[name].panel)].log
        drawings += _curves(f"{key}-{name}", settings, metric, kind, log=log)
    return drawings


def _svg(key: str, draw: Callable[[Any], None]) -> Markup:
    """Let ``draw`` fill axes; return the figure as the contents of an svg element."""
    with matplotlib.rc_context({**LOOK, "svg.hashsalt": key}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
        axes = figure.subplots()
        draw(axes)
        figure.subplots_adjust(0.16, 0.17, 0.98, 0.9)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<g ") : text.rindex("</svg>")]
    return Markup(re.sub(r">\s+<", "><", re.sub("<[^>]+>", _tag, text)))


def _tag(tag: re.Match[str]) -> str:
    """Make ids of settings classes, drop other ids, and round paths to two decimals of a pixel."""
    text = re.sub(r' id="(s\d+ \w+)"', r' class="\1"', tag[0])
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    return re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+|\n", r"\1", d[0]), text)


class _Short(EngFormatter):
    """Formats 10,000 as 10k and two million as 2M; leaves small numbers unchanged."""

    ENG_PREFIXES = {0: "", 3: "k", 6: "M", 9: "G"}  # noqa: RUF012


def label(axes: Any, x: str, y: str) -> None:
    """Label the axes, and shorten the numbers at the ticks."""
    axes.set_xlabel(x)
    axes.set_title(y, loc="left")  # above the numbers, which may be wide
    axes.xaxis.set_major_formatter(_Short(sep=""))
    axes.yaxis.set_major_formatter(_Short(sep=""))


# ------------------------------------------------------------------------------- return against KL


def _against_kl(
    key: str,
    settings: Sequence[Setting],
    differences: Sequence[Difference],
    of: str,
    title: str,
    metric: Metric,
    kl: Metric,
) -> Drawing:
    """Draw the measure ``of`` against the root of the KL; each setting is one point.

    The x-axis is that of Gao, Schulman and Hilton 2022, "Scaling laws for reward model
    overoptimization".
    """
    best = front(settings, differences)

    def draw(axes: Any) -> None:
        points = [
            draw_point(axes, each, i, [_root_of_kl(each), each.values[of]], filled=i in best)
            for i, each in enumerate(settings)
        ]
        joined = np.array([points[i] for i in best]).reshape(-1, 2)
        axes.plot(*joined.T, color="#737373", linestyle=":", zorder=0)
        label(axes, f"sqrt(KL(policy||reference)), KL in {kl.unit}", f"final {metric.unit}")
        # sqrt(KL) is never negative, but a mark at 0 needs a margin.
        low, high = axes.get_xlim()
        axes.set_xlim(left=max(low, -0.04 * high))

    what = "filled and joined: the front, where no setting with an equal or lower KL has a "
    what = f"{what}significantly higher {title}" if best else "no front: the seeds are too few"
    title = f"{heading(title)} against sqrt(KL(policy||reference))"
    return Drawing("against", title, what, _svg(key, draw))


def _root_of_kl(setting: Setting) -> Array:
    """Return sqrt(KL), [runs]. A KL estimated from samples may be negative; it counts as 0."""
    return np.sqrt(np.maximum(setting.values["kl_ref"], 0.0))


def draw_point(
    axes: Any, setting: Setting, i: int, at: Sequence[Array], *, filled: bool
) -> tuple[float, float]:
    """Draw the i-th setting: its seeds at ``at``, [2, runs], their mean and its intervals."""
    seeds = np.where(np.abs(at) > MOST, np.nan, at)
    across, up = map(estimate, seeds)
    if across is None or up is None:
        return np.nan, np.nan
    colour, _, shape, _ = look_of(i)
    for run, at in zip(setting.runs, seeds.T, strict=True):
        mark, kind = ("x", "failed") if run.failed else (shape, "dot")
        axes.plot(*at, mark, color=colour, alpha=0.5, markersize=4, gid=f"s{i} {kind}")
    x, y = across.value, up.value
    for of_x, of_y in (([x, x], _interval(up)), (_interval(across), [y, y])):
        if of_x and of_y:
            axes.plot(of_x, of_y, color=colour, gid=f"s{i} bar")
    # Of equal settings, each is larger than the later ones.
    size = {"markersize": 11 - 2 * (i % 4), "markerfacecolor": colour if filled else "white"}
    axes.plot(x, y, shape, color=colour, gid=f"s{i} point", **size)
    return x, y


def _interval(of: Estimate) -> list[float]:
    """Return both ends of an estimate's interval; [] with too few seeds."""
    return [] if of.low is None or of.high is None else [of.low, of.high]


# ---------------------------------------------------------------------------------- learning curves


def _curves(
    key: str, settings: Sequence[Setting], metric: Metric, kind: str, *, log: bool
) -> list[Drawing]:
    """Draw a metric over frames; [] if there is nothing to draw."""
    curves = {i: curve(setting, metric.name) for i, setting in enumerate(settings)}
    drawn = {i: of for i, of in curves.items() if (of[1] > (0.0 if log else -np.inf)).any()}
    axis = metric_of(settings[0].runs[0].axis, settings[0].runs[0].domain)

    def draw(axes: Any) -> None:
        label(axes, axis.title, f"{metric.unit} (log)" if log else metric.unit)
        draw_curves(axes, settings, drawn, kind, log=log)

    left_out = [s.name for i, s in enumerate(settings) if curves[i][0].size and i not in drawn]
    what = metric.what + f"; no value on the axis: {', '.join(left_out)}" * bool(left_out)
    # A single point per setting, as of the closing evaluation, is in the table of results.
    more = any(len(x) > 1 for x, _ in drawn.values())
    return [Drawing(kind, heading(metric.title), what, _svg(key, draw))] if more else []


def draw_curves(
    axes: Any,
    settings: Sequence[Setting],
    curves: Mapping[int, tuple[Array, Array]],
    kind: str,
    *,
    log: bool,
) -> None:
    """Draw the i-th setting's :func:`curve`, for each i of ``curves``."""
    for i, (x, seeds) in curves.items():
        _draw_curve(axes, settings[i], i, x, seeds, kind, 0.0 if log else -np.inf)
    axes.set_xlim(left=0)
    values = np.concatenate([seeds[seeds > 0] for _, seeds in curves.values()])
    if log and len(values):
        _log_axis(axes, values)


def _log_axis(axes: Any, values: Array) -> None:
    """Make the y-axis logarithmic, with plain numbers: 0.02, not 2 x 10^-2."""
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    # Values far below the others are rounding errors, such as the KL at the start.
    low, high = axes.set_ylim(bottom=max(low, float(np.quantile(values, 0.1)) / 10))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def _draw_curve(
    axes: Any, setting: Setting, i: int, x: Array, seeds: Array, kind: str, least: float
) -> None:
    """Draw a setting's mean, interval and seeds; the interval is drawn above ``least``."""
    known = [[of.value, of.low, of.high] if of else [None] * 3 for of in estimate_curve(seeds)]
    middle, low, high = np.array(known, float).T
    above = [value for value in (*middle, *low) if value > least]
    low = np.where(low <= least, min(above, default=np.nan), low)
    colour, dashes, shape, _ = look_of(i)
    dot = {"marker": shape, "markersize": 4} if len(x) == 1 else {}
    for run, values in zip(setting.runs, seeds, strict=True):
        if run.failed:  # values after a failure count in the mean, but are not drawn
            values[int(np.searchsorted(x, run.end)) + 1 :] = np.nan
            last = np.flatnonzero(np.isfinite(values))[-1:]
            axes.plot(x[last], values[last], "x", color=colour, markersize=5, gid=f"s{i} failed")
        if kind != "more":
            look = {"color": colour, "alpha": 0.3, "linewidth": 0.7, "gid": f"s{i} seed"}
            axes.plot(x, values, **look, **dot)
    if np.isfinite(low).any():
        band = {"color": colour, "alpha": 0.15, "linewidth": 0, "gid": f"s{i} band"}
        axes.fill_between(x, low, high, **band)
    mean = {"color": colour, "linewidth": 2, "zorder": 3, "gid": f"s{i} mean"}
    axes.plot(x, middle, dashes=dashes, **mean, **dot)
