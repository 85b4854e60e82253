"""The second edition's search: ``python -m benchmarks.mujoco.search`` runs what is missing.

Equal effort for each loss, as docs/results/mujoco/protocol.md has it: all settings with the first
seed, the best two again with the second.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
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


def score(words: tuple[str, ...], known: Lines) -> float:
    """Geometric mean over tasks of the mean return over the seeds that are there."""
    means = []
    for task in range(len(TWO)):
        found = [known.get(cells(words, seed)[task]) for seed in SEEDS]
        returns = [line["return"] for line in found if line]
        means.append(np.mean(returns) if returns else 0.0)
    return float(np.sqrt(np.prod(means))) if min(means) > 0 else 0.0


def best_two(loss: str, known: Lines) -> list[tuple[str, ...]]:
    """By the first seed alone, so that a search that goes on has the same two."""
    first = {
        words: [known.get(cell) for cell in cells(words, SEEDS[0])] for words in SEARCHED[loss]
    }

    def of(words: tuple[str, ...]) -> float:
        returns = [line["return"] if line else 0.0 for line in first[words]]
        return float(np.prod(returns)) if min(returns) > 0 else 0.0

    return sorted(SEARCHED[loss], key=of, reverse=True)[:2]


def chosen(loss: str, known: Lines) -> tuple[str, ...]:
    """Of the best two, the one with the higher score over both seeds."""
    return max(best_two(loss, known), key=lambda words: score(words, known))


def complete(known: Lines) -> bool:
    """Whether all of it was run."""
    first = [
        cell for each in SEARCHED.values() for words in each for cell in cells(words, SEEDS[0])
    ]
    if not all(map(known.get, first)):
        return False
    best = (words for loss in SEARCHED for words in best_two(loss, known))
    return all(known.get(cell) for words in best for cell in cells(words, SEEDS[1]))


def run(jobs: int) -> list[str]:
    """Both stages; what failed."""
    known = lines()
    stage = [
        cell for i in range(4) for each in SEARCHED.values() for cell in cells(each[i], SEEDS[0])
    ]
    failed = run_cells(stage, known, jobs)
    last: Iterable[Cell] = (
        cell
        for loss in SEARCHED
        for words in best_two(loss, known)
        for cell in cells(words, SEEDS[1])
    )
    return failed + run_cells(last, known, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mujoco.search", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    failed, known = run(parser.parse_args().jobs), lines()
    for loss, settings in SEARCHED.items():
        for words in settings:
            mark = "  <- taken" if words == chosen(loss, known) else ""
            print(f"{score(words, known):8,.0f}  {' '.join(words)}{mark}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
