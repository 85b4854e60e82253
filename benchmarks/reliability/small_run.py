"""A small model, and commands of klrl in forks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability.ended import LIMIT, Ended, fork, in_fork
from benchmarks.small_jobs import FILES

#: A language job on the files of :func:`text_files`.
TEXT = "experiment=text env.data=prompts.jsonl env.reward=rewards:score actor.model=model"


def klrl(words: Sequence[str], work: Path, limit: float = LIMIT) -> Ended:
    """Run a command of klrl in a fork."""
    return in_fork(partial(_go, words), work, limit)


def begin(words: Sequence[str], work: Path) -> int:
    """Start the same without waiting: the id of the fork, whose output goes nowhere."""
    with Path(os.devnull).open("wb") as nowhere:
        return fork(partial(_go, words), work, nowhere.fileno(), nowhere.fileno())


def _go(words: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    from klrl.cli.main import main

    Figure.savefig = stand_in
    main(words)


def stand_in(figure: Any, path: Path, **options: Any) -> None:
    """Write a file for ``curves.png`` without drawing it, which would be half of all the time."""
    path.write_bytes(b"\x89PNG")


def text_files(folder: Path) -> None:
    """Write the prompts and the reward function of :data:`TEXT`."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


#: What the commands import late.
_LATE = (
    *("cli.diff", "cli.evaluate", "cli.ls", "cli.report", "cli.run", "control.run.parts"),
    *("report.diff", "report.write", "runs.curves", "runs.resume"),
    *("train.scores", "train.loop"),
)


def import_all(*more: str) -> None:
    """Import what the commands import, so that each fork need not."""
    for name in (*(f"klrl.{each}" for each in _LATE), "matplotlib.pyplot", *more):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def make_model(folder: Path) -> None:
    """Build a language model of a few thousand parameters, which has hardly learned."""
    from benchmarks.sort_digits_base import Recipe, build

    small = {"hidden": 16, "layers": 1, "heads": 2, "batch": 8, "context": 64}
    build(Recipe(**small, measure_every=4, measure_on=8, target=0.0), folder)
