"""Pictures of the page: training return over frames, and over CPU seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.mujoco.cells import SB3, ZOO, Line
from benchmarks.mujoco.published import NAMES
from benchmarks.mujoco.runs import ACTION, CLIP, HELD, KL, KLPEN, TRPO, Known, title
from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, PINK, RED, panels

COLOUR = {
    **{HELD: BLUE, CLIP: GREEN, KLPEN: ORANGE, KL: RED, SB3: BLACK},
    **{ACTION: PINK, TRPO: ORANGE, ZOO: BLACK},
}
LABELS = {"frames": "thousand frames", "seconds": "CPU seconds"}
#: Of a mean over seeds.
GRID = 200


def draw_curves(
    path: Path, cells: Known, axis: str, tasks: Sequence[str] = tuple(NAMES), columns: int = 3
) -> None:
    """A panel per task: a thin line per seed, and their mean while all of them run."""
    with panels(path, len(tasks) // columns, columns, height=2.9) as axes:
        for each, task in zip(axes.ravel(), tasks, strict=True):
            for setting, by_task in cells.items():
                lines = by_task.get(task, ())
                if lines:
                    _curves(each, lines, axis, COLOUR[setting], title(setting))
            each.set(title=NAMES[task])
        for each in axes[-1]:
            each.set(xlabel=LABELS[axis])
        for each in axes[:, 0]:
            each.set(ylabel="training return")


def training_cpu(line: Line) -> float:
    """CPU seconds of a run without its evaluation.

    The process's CPU time, spread over training and evaluation as their seconds by the clock are.
    """
    return float(line["cpu"] * line["seconds"] / (line["seconds"] + line["evaluation_seconds"]))


def x_of(line: Line, axis: str) -> np.ndarray:
    """The points' places: thousands of frames; or CPU seconds, spread as the clock's seconds."""
    points = np.array(line["curve"][axis], float)
    return points / 1000 if axis == "frames" else points * training_cpu(line) / line["seconds"]


def _curves(axes: object, lines: Sequence[Line], axis: str, colour: str, label: str) -> None:
    curves = []
    for line in lines:
        x, y = x_of(line, axis), np.array(line["curve"]["return"], float)
        ended = np.isfinite(y)  # at least one episode ended
        curves.append((x[ended], y[ended]))
        axes.plot(*curves[-1], color=colour, linewidth=0.5, alpha=0.3)  # type: ignore[attr-defined]
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), GRID)
    mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
    axes.plot(grid, mean, color=colour, linewidth=1.6, label=label)  # type: ignore[attr-defined]
