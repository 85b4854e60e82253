"""``curves.png``: return, KLs and coefficients of a run against frames or samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from klrl.metrics import Row

#: panel title -> scale, and metrics with their labels
Panel: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]


def panels(axis: str, unit: str) -> tuple[Panel, ...]:
    """The three panels of a run; a response's return is its reward."""
    returns = [("reward/episode", "training episodes"), ("eval/return", "evaluation")]
    if axis == "samples":
        returns = [
            ("reward/episode", "training samples"),
            ("eval/return", "evaluation, greedy"),
            ("reward/gold", "gold score, training samples"),
        ]
    return (
        ("Return" if axis == "frames" else "Reward", "linear", tuple(returns)),
        (
            f"KL, nats per {unit}",
            "log",
            (("kl/ref/exact", "KL(policy||reference)"), ("kl/old/exact", "KL(old||new)")),
        ),
        ("Coefficient", "log", (("kl/ref/coef", "kl.coef"), ("kl/old/beta", "loss.beta"))),
    )


#: Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73")


def draw_curves(
    rows: Sequence[Row], path: Path, title: str, axis: str = "frames", unit: str = "frame"
) -> None:
    """Draw a run's curves into a PNG.

    Args:
        rows: of ``metrics.jsonl``.
        path: the file.
        title: above all panels.
        axis: the x-axis: frames, or samples for language.
        unit: what a mean KL is a mean over.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, scale, series) in zip(figure.subplots(1, 3), panels(axis, unit), strict=True):
        for (metric, label), colour in zip(series, COLOURS, strict=False):
            points = [(row[axis], row[metric]) for row in rows if metric in row]
            if scale == "log":
                points = [(x, y) for x, y in points if y > 0]
            if points:
                marker = "o" if metric.startswith("eval") or len(points) == 1 else None
                axes.plot(
                    *zip(*points, strict=True), color=colour, label=label, marker=marker, ms=4
                )
        axes.set_title(name)
        axes.set_xlabel(axis)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.set_yscale(scale)
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
