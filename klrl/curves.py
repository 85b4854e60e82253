"""``curves.png``: return, KLs and coefficients of a run against frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.metrics import Row

#: panel title -> metrics and their labels
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Return", "linear", (("reward/episode", "training episodes"), ("eval/return", "evaluation"))),
    (
        "KL, nats per frame",
        "log",
        (("kl/ref/exact", "KL(policy||reference)"), ("kl/old/exact", "KL(old||new)")),
    ),
    ("Coefficient", "log", (("kl/ref/coef", "kl.coef"), ("kl/old/beta", "loss.beta"))),
)
#: Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00")


def draw_curves(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw a run's curves into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, scale, series) in zip(figure.subplots(1, 3), PANELS, strict=True):
        for (metric, label), colour in zip(series, COLOURS, strict=True):
            points = [(row["frames"], row[metric]) for row in rows if metric in row]
            if scale == "log":
                points = [(x, y) for x, y in points if y > 0]
            if points:
                marker = "o" if metric.startswith("eval") or len(points) == 1 else None
                axes.plot(
                    *zip(*points, strict=True), color=colour, label=label, marker=marker, ms=4
                )
        axes.set_title(name)
        axes.set_xlabel("frames")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.set_yscale(scale)
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
