"""What the pictures share: Okabe and Ito's colours, intervals over seeds, every seed as a dot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.shipped.tables import Row, interval
from klrl.report.charts import curve
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.runs.curves import COLOURS

BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
#: Inches; 1100 pixels wide, of which a README shows about 830.
WIDTH, HEIGHT, DPI = 10.0, 3.6, 110
#: Entries in a row of the legend.
LEGEND = 6


@contextmanager
def panels(path: Path, rows: int, columns: int, height: float = HEIGHT) -> Iterator[Any]:
    """Axes [rows, columns] to draw on; the picture, one legend below, is written at the end."""
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
    """The mean with its interval, and every seed beside it."""
    found, (low, high) = row.estimate(key), interval(row, key)
    spread = [[found.value - _or(low, found.value)], [_or(high, found.value) - found.value]]
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
    """The means of several rows joined, their intervals, every seed as a dot ``aside`` of it."""
    middle = np.array([row.estimate(key).value for row in rows])
    ends = [interval(row, key) for row in rows]
    low, high = (
        np.array([_or(each, value) for each, value in zip(column, middle, strict=True)])
        for column in zip(*ends, strict=True)
    )
    style = {"marker": "o", "markersize": 6, "capsize": 3, "zorder": 3, **look}
    axes.errorbar(x, middle, yerr=np.abs([middle - low, high - middle]), color=colour, **style)
    for place, row in zip(x, rows, strict=True):
        values = np.asarray(row.values[key])
        beside = place + np.linspace(0.06, 0.14, len(values)) * aside
        axes.scatter(beside, values, s=12, color=colour, alpha=0.55, linewidths=0)


def learning_curve(
    axes: Any, runs: Sequence[ReadRun], metric: str, colour: str, style: str = "-", **look: Any
) -> None:
    """A metric against frames: the mean over seeds, and a thin line per seed."""
    for run in runs:
        axes.plot(*_curve([run], metric), style, color=colour, linewidth=0.6, alpha=0.35)
    axes.plot(*_curve(runs, metric), style, color=colour, linewidth=1.6, **look)


def _curve(runs: Sequence[ReadRun], metric: str) -> tuple[list[float], list[float]]:
    """Thousand frames, and the mean over runs at each."""
    points = curve(Setting("", list(runs)), metric)
    assert points, f"{metric} was not recorded"
    return [point.x / 1000 for point in points], [point.y.value for point in points]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
