"""Swimmer's two outcomes: how many runs have each, and how early training shows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.mujoco.cells import Line
from benchmarks.mujoco.runs import HELD, SEEDS, Known, title, values

TASK = "swimmer"
#: The return above which a run is fast, in training and at its end.
FAST = 200
#: Frames at which the runs are compared: before and after the outcomes part.
EARLY, PARTED = 61_440, 163_840


def correlation(x: Sequence[float], y: Sequence[float], means: int = 1) -> str:
    """Format Pearson's r and its 95 % interval by Fisher's z, as in ``0.52 [-0.16, 0.87]``.

    ``means`` is the number of means that were subtracted.
    """
    r = float(np.corrcoef(x, y)[0, 1])
    ends = np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / np.sqrt(len(x) - means - 2))
    return f"{r:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def first(cells: Known) -> list[str]:
    """The first edition: klpen_held's correlations, and how fast and slow runs end."""
    held = cells[HELD].get(TASK, ())
    if len(held) < SEEDS[HELD]:
        return []
    end = list(values(cells, HELD, TASK))
    told = [
        f"{correlation([_at(line, frames) for line in held], end)} at {frames:,} frames"
        for frames in (EARLY, PARTED)
    ]
    early = [
        np.mean([kl for kl, frames in zip(c["kl_old"], c["frames"], strict=True) if frames < 1e5])
        for c in (line["curve"] for line in held)
    ]
    return [
        "How early training shows the outcome: the correlation of klpen_held's final return "
        "with its return in training is "
        f"{told[0]}, and {told[1]}. {_sides(cells)} The size of the steps is not shown to predict "
        "the outcome: the correlation of the final return with the mean KL(old||new) before "
        f"100,000 frames is {correlation(early, end)}."
    ]


def second(found: Known) -> list[str]:
    """The second edition: how many runs of each setting end fast, and how early it shows."""
    settings = {title(name): tasks[TASK] for name, tasks in found.items() if TASK in tasks}
    if min((len(lines) for lines in settings.values()), default=0) < 2:
        return []
    well = ", ".join(
        f"{name} {sum(line['return'] > FAST for line in lines)} of {len(lines)}"
        for name, lines in settings.items()
    )
    # Each setting's mean is subtracted, so that the settings' own differences do not count.
    centred = [
        np.array([[_at(line, EARLY), _at(line, PARTED), line["return"]] for line in lines])
        for lines in settings.values()
    ]
    early, parted, end = np.concatenate([each - each.mean(0) for each in centred]).T
    return [
        f"Runs of Swimmer that end above {FAST}: {well}. {_sides(found)} Within a setting, "
        "the correlation of the final return with the return in training is "
        f"{correlation(early, end, len(settings))} at {EARLY:,} frames, and "
        f"{correlation(parted, end, len(settings))} at {PARTED:,} frames."
    ]


def _at(line: Line, frames: int) -> float:
    points = line["curve"]
    return float(points["return"][points["frames"].index(frames)])


def _sides(cells: Known) -> str:
    """Report how the runs end that are fast, or slow, at PARTED frames."""
    runs = [line for by_task in cells.values() for line in by_task.get(TASK, ())]
    fast, slow = (
        sorted(line["return"] for line in runs if (_at(line, PARTED) > FAST) == above)
        for above in (True, False)
    )
    late = [each for each in slow if each > FAST]
    return (
        f"Of all {len(runs)} runs, {len(fast)} return more than {FAST} in training at "
        f"{PARTED:,} frames, and end at {fast[0]:.0f} to {fast[-1]:.0f}; of the other "
        f"{len(slow)}, {len(late)} end above {FAST} ({', '.join(f'{each:.0f}' for each in late)})."
    )
