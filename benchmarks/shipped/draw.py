"""What the pictures share: Okabe and Ito's colours, intervals over seeds, every seed as a dot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.shipped.tables import Row
from klrl.report.charts import curve
from klrl.report.runs import Run
from klrl.report.settings import Setting
from klrl.runs.curves import COLOURS

BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
#: Inches; 1100 pixels wide, of which a README shows about 830.
WIDTH, HEIGHT, DPI = 10.0, 3.6, 110
#: Entries in a row of the legend.
LEGEND = 5


@contextmanager
def panels(path: Path, rows: int, columns: int, height: float = HEIGHT) -> Iterator[Any]:
    """Axes [rows, columns] to draw on; the picture, one legend below, is written at the end.

    Args:
        path: the PNG.
        rows: of panels.
        columns: likewise.
        height: of a row, inches.
    """
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    yield axes
    named = {}
    for each in axes.ravel():
        named |= {
            name: handle for handle, name in zip(*each.get_legend_handles_labels(), strict=True)
        }
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    below = {"loc": "outside lower center", "fontsize": 9, "frameon": False}
    if named:
        figure.legend(named.values(), named.keys(), ncols=min(len(named), LEGEND), **below)
    figure.savefig(path, dpi=DPI)


def dots(axes: Any, x: float, row: Row, key: str, colour: str, **look: Any) -> None:
    """The interquartile mean with its interval, and every seed beside it."""
    found = row.estimate(key)
    spread = [
        [found.value - _or(found.low, found.value)],
        [_or(found.high, found.value) - found.value],
    ]
    style = {"fmt": "o", "markersize": 7, "capsize": 3, "zorder": 3, **look}
    axes.errorbar([x], [found.value], yerr=np.abs(spread), color=colour, **style)
    values = np.asarray(row.values[key])
    beside = x + np.linspace(0.12, 0.24, len(values))
    axes.scatter(beside, values, s=12, color=colour, alpha=0.55, linewidths=0, zorder=2)


def line(
    axes: Any,
    x: Sequence[float],
    rows: Sequence[Row],
    key: str,
    colour: str,
    aside: float = 0.0,
    **look: Any,
) -> None:
    """The interquartile means of several rows joined, their intervals, every seed as a dot.

    Args:
        axes: to draw on.
        x: a place per row.
        rows: whose values.
        key: the measure.
        colour: of all.
        aside: how far the dots stand beside their place; 1 where places are 1 apart.
        look: of the line and its markers.
    """
    found = [row.estimate(key) for row in rows]
    middle = np.array([e.value for e in found])
    low, high = (
        np.array([_or(getattr(e, end), e.value) for e in found]) for end in ("low", "high")
    )
    style = {"marker": "o", "markersize": 6, "capsize": 3, "zorder": 3, **look}
    axes.errorbar(x, middle, yerr=np.abs([middle - low, high - middle]), color=colour, **style)
    for place, row in zip(x, rows, strict=True):
        values = np.asarray(row.values[key])
        beside = place + np.linspace(0.06, 0.14, len(values)) * aside
        axes.scatter(beside, values, s=12, color=colour, alpha=0.55, linewidths=0)


def learning_curve(
    axes: Any, runs: Sequence[Run], metric: str, colour: str, style: str = "-", **look: Any
) -> None:
    """A metric against frames: the mean over seeds, and its interval as a band."""
    points = curve(Setting("", list(runs), runs[0].settings), metric)
    assert points, f"{metric} was not recorded"
    x = [point.x / 1000 for point in points]
    estimates = [point.y for point in points]
    axes.plot(x, [y.value for y in estimates], style, color=colour, linewidth=1.6, **look)
    low, high = ([_or(getattr(y, end), y.value) for y in estimates] for end in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
