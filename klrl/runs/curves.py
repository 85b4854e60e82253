"""Draws ``curves.png``: panels of a run's metrics, against frames or samples."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klrl.base.files import replacing
from klrl.base.imports import collection_paused
from klrl.domains import Domain
from klrl.runs.metrics import PANELS, Metric, Panel, Row, fill, heading, metrics_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def panels(domain: Domain) -> dict[str, tuple[Panel, list[Metric]]]:
    """Map the title of each panel of ``curves.png`` to the panel and its metrics, in order."""
    metrics = metrics_of(domain).values()
    return {
        heading(fill(panel.title, domain)): (panel, [each for each in metrics if each.panel == key])
        for key, panel in PANELS.items()
        if panel.title is not None
    }


def draw_curves(rows: Sequence[Row], path: Path, title: str, domain: Domain) -> None:
    """Draw a run's curves, as :func:`curves_figure` does, into a PNG file."""
    with replacing(path) as partial:
        curves_figure(rows, title, domain).savefig(partial, dpi=110)


def curves_figure(rows: Sequence[Row], title: str, domain: Domain) -> Figure:
    """Draw the rows of a run's ``metrics.jsonl`` as curves into a matplotlib figure."""
    with collection_paused():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    drawn = panels(domain)
    figure = Figure(figsize=(13, 3.8))
    FigureCanvasAgg(figure)
    places = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (name, (panel, metrics)) in zip(places, drawn.items(), strict=True):
        axes.set_title(name, parse_math=False)
        axes.set_xlabel(domain.axis)
        axes.grid(alpha=0.3)
        _draw(axes, panel, metrics, rows, domain.axis)
    figure.suptitle(title, parse_math=False)
    # Fixed margins: a constrained layout would draw everything twice to compute them.
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.13, top=0.85, wspace=0.35)
    return shown(figure)


def shown(figure: Figure) -> Figure:
    """Let a notebook show a figure, even without matplotlib's inline backend."""
    figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def _draw(
    axes: Any, panel: Panel, metrics: Sequence[Metric], rows: Sequence[Row], axis: str
) -> None:
    """Draw a line per recorded metric, coloured by its position; dashed if in another's place."""
    units, places = [], [each.name for each in metrics if not each.unless]
    for metric in metrics:
        drawn = [row for row in rows if metric.name in row and metric.unless not in row]
        points = [(row[axis], row[metric.name]) for row in drawn]
        # A KL of rounding size, as before the first update, would make an axis of 14 decades.
        points = [(x, y) for x, y in points if not panel.log or (y > 0 and metric.show(y) != "0")]
        if not points:
            continue
        marker = "o" if metric.name.startswith("eval") or len(points) == 1 else None
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[places.index(metric.unless or metric.name) % len(COLOURS)],
            linestyle="--" if metric.unless else "-",
            label=metric.title,
            marker=marker,
            markersize=4,
        )
        units.append(metric.unit)
    if units:
        axes.set_ylabel(", ".join(dict.fromkeys(filter(None, units))))
        axes.set_yscale("log" if panel.log else "linear")
        axes.legend()
