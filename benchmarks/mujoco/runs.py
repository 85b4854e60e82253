"""What the page is made of: tasks, settings, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.mujoco.cells import SB3, ZOO, Cell, Line, Lines
from benchmarks.mujoco.published import NAMES
from benchmarks.results import ROOT

FOLDER = ROOT / "docs/results/mujoco"
#: Those that are compared with other losses, and with published figures in one number.
MAIN = ("half_cheetah", "hopper", "walker2d", "ant", "swimmer")
#: Those with the regulariser on, and those that Stable-Baselines3 is run on.
TWO = ("half_cheetah", "hopper")
HELD, CLIP, KLPEN, KL = "klpen_held", "clip", "klpen", "klpen_held_kl"
#: Of the second edition alone.
ACTION, TRPO = "klpen_action", "trpo"
#: What a table calls them, where it is not their name.
TITLES = {
    KL: "klpen_held, kl.coef=0.01, reference=ema",
    SB3: "Stable-Baselines3, CleanRL's settings",
    ACTION: "klpen_held per action",
    ZOO: "Stable-Baselines3, its zoo's settings",
}
#: What klpen_held shipped with until the second edition was judged.
PER_STATE = ("loss=klpen_held", "loss.dtarg=0.01", "loss.dtarg_per=state", "loss.max_alpha=8")
#: Setting -> words, beside the presets'.
SETTINGS: dict[str, tuple[str, ...]] = {
    HELD: ("kl=none", *PER_STATE),
    CLIP: ("kl=none", "loss=clip"),
    KLPEN: ("kl=none", "loss=klpen"),
    KL: ("kl.coef=0.01", "reference=ema", *PER_STATE),
}
#: Setting -> task -> its finished cells.
Known = Mapping[str, Mapping[str, Sequence[Line]]]
SEEDS = {HELD: 10, CLIP: 5, KLPEN: 5, KL: 5, SB3: 3}


def cells_of(setting: str) -> list[Cell]:
    """Seed by seed, so that a stopped run knows some seeds of every task."""
    tasks: Sequence[str] = {HELD: tuple(NAMES), KL: TWO, SB3: TWO}.get(setting, MAIN)
    words = SETTINGS.get(setting, ())
    return [Cell(task, setting, seed, words) for seed in range(SEEDS[setting]) for task in tasks]


def lines_of(setting: str, folder: Path = FOLDER) -> Lines:
    """The committed file of a setting."""
    return Lines(folder / "cells" / f"{setting}.jsonl")


def known(setting: str, folder: Path = FOLDER) -> dict[str, list[Line]]:
    """Task -> its finished cells, by seed."""
    lines, found = lines_of(setting, folder), {}
    for cell in cells_of(setting):
        line = lines.get(cell)
        if line is not None:
            found.setdefault(cell.task, []).append(line)
    return found


def values(cells: Known, setting: str, task: str, key: str = "return") -> np.ndarray:
    """One number per finished seed."""
    return np.array([line[key] for line in cells[setting].get(task, ())], float)


def title(setting: str) -> str:
    """What tables and pictures call it."""
    return TITLES.get(setting, setting)


def table_line(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
