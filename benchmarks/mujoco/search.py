"""The second edition's search, as docs/results/mujoco/protocol.md has it: equal for each loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.mujoco.cells import Cell, Lines, run_cells
from benchmarks.mujoco.runs import FOLDER, TWO

SEEDS = (110, 111)
COMMON = ("kl=none", "frames=300000")
#: Loss -> the words of its settings.
SEARCHED: dict[str, list[tuple[str, ...]]] = {
    "clip": [("loss=clip", f"loss.clip_epsilon={each}") for each in (0.1, 0.2, 0.3, 0.4)],
    "klpen_action": [
        (
            "loss=klpen_held",
            "loss.dtarg_per=action",
            f"loss.dtarg={dtarg}",
            f"loss.max_alpha={most}",
        )
        for dtarg in (0.0035, 0.007)
        for most in (1, 2)
    ],
    "trpo": [
        ("loss=trpo", "loss.dtarg_per=action", f"loss.dtarg={dtarg}")
        for dtarg in (0.0025, 0.005, 0.01, 0.02)
    ],
}


def lines(folder: Path = FOLDER) -> Lines:
    """What was run."""
    return Lines(folder / "search_2.jsonl")


def cells(words: tuple[str, ...], seed: int) -> list[Cell]:
    """A setting with a seed, on both tasks."""
    name = "_".join(each.removeprefix("loss").strip(".=").replace("=", "_") for each in words)
    return [Cell(task, name, seed, (*COMMON, *words)) for task in TWO]


def score(words: tuple[str, ...], known: Lines, seeds: Sequence[int] = SEEDS) -> float:
    """Geometric mean over tasks of the mean return over the seeds that are there."""
    means = []
    for of_task in zip(*(cells(words, seed) for seed in seeds), strict=True):
        returns = [line["return"] for line in map(known.get, of_task) if line]
        means.append(np.mean(returns) if returns else 0.0)
    return float(np.sqrt(np.prod(means))) if min(means) > 0 else 0.0


def best_two(loss: str, known: Lines) -> list[tuple[str, ...]]:
    """By the first seed alone, so that a search that goes on has the same two."""
    settings = SEARCHED[loss]
    return sorted(settings, key=lambda words: score(words, known, SEEDS[:1]), reverse=True)[:2]


def chosen(loss: str, known: Lines) -> tuple[str, ...]:
    """Of the best two, the one with the higher score over both seeds."""
    return max(best_two(loss, known), key=lambda words: score(words, known))


def stages(known: Lines) -> tuple[list[Cell], list[Cell]]:
    """All settings with the first seed; the best two of each loss with the second."""
    first = [
        cell
        for each in zip(*SEARCHED.values(), strict=True)
        for words in each
        for cell in cells(words, SEEDS[0])
    ]
    best = [words for loss in SEARCHED for words in best_two(loss, known)]
    return first, [cell for words in best for cell in cells(words, SEEDS[1])]


def complete(known: Lines) -> bool:
    """Whether all of it was run."""
    return all(known.get(cell) for stage in stages(known) for cell in stage)


def run(jobs: int) -> list[str]:
    """Both stages; what failed."""
    known = lines()
    failed = run_cells(stages(known)[0], known, jobs)
    return failed or run_cells(stages(known)[1], known, jobs)
