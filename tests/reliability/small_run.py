"""A small model, and commands of klrl in forks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.reliability.ended import Ended, in_fork


def klrl(words: Sequence[str], work: Path) -> Ended:
    """Run a command of klrl in a fork."""
    return in_fork(partial(_go, words), work)


def _go(words: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    from klrl.cli.main import main

    Figure.savefig = stand_in
    main(words)


def stand_in(figure: Any, path: Path, **options: Any) -> None:
    """Write a file for ``curves.png`` without drawing it, which would be half of all the time."""
    path.write_bytes(b"\x89PNG")


#: What the commands import late.
_LATE = (
    *("cli.diff", "cli.evaluate", "cli.ls", "cli.report", "cli.run", "control.run.parts"),
    *("report.diff", "report.write", "runs.curves", "runs.resume"),
    *("train.scores", "train.loop"),
)


def import_all() -> None:
    """Import what the commands import, so that each fork need not."""
    for name in (*(f"klrl.{each}" for each in _LATE), "matplotlib.pyplot"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def make_model(folder: Path) -> None:
    """Build a language model of a few thousand parameters, which has hardly learned."""
    from benchmarks.sort_digits_base import Recipe, build

    small = {"hidden": 16, "layers": 1, "heads": 2, "batch": 8, "context": 64}
    build(Recipe(**small, measure_every=4, measure_on=8, target=0.0), folder)
