"""The small run of ``make faults`` and ``make fuzz``, and the commands that they give in forks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability.ended import LIMIT, Ended, fork, in_fork
from benchmarks.reliability.operations import Operations

RUN = Path("run")
#: A second's run, with a checkpoint and an evaluation in each iteration of :data:`FRAMES` frames.
WORDS = (
    *("env=pendulum", "env.num_envs=2", "env.normalize_observation=true", "collector.steps=32"),
    *("learner.minibatches=2", "learner.epochs=1", "learner.compile=false", "actor.hidden=[8]"),
    *("optim.lr_floor=0", "checkpoint.every=1", "eval.every=1", "eval.episodes=1"),
    *("device=cpu", "logger=none"),
)
FRAMES = 64


def klrl(
    words: Sequence[str], work: Path, operations: Operations | None = None, limit: float = LIMIT
) -> Ended:
    """A command of klrl in a fork."""
    return in_fork(partial(_go, words, operations), work, limit)


def begin(words: Sequence[str], work: Path) -> int:
    """The same, which is not waited for: the id of the fork, whose output goes nowhere."""
    return fork(partial(_go, words), work, os.devnull)


def _go(words: Sequence[str], operations: Operations | None = None) -> None:
    from matplotlib.figure import Figure

    from klrl.cli.main import main

    Figure.savefig = stand_in
    if operations is not None:
        operations.install()
    main(words)


def stand_in(figure: Any, path: Path, **options: Any) -> None:
    """Write a file for ``curves.png`` without drawing it, which would be half of all the time."""
    with path.open("wb") as file:
        for piece in (b"\x89PNG", b"in", b"place"):
            file.write(piece)


def import_all() -> None:
    """What the commands import, so that each fork need not."""
    import torch

    import klrl.cli.diff
    import klrl.cli.evaluate
    import klrl.cli.ls
    import klrl.cli.report
    import klrl.cli.run
    import klrl.control.parts
    import klrl.domains
    import klrl.report.diff
    import klrl.report.write
    import klrl.runs.curves
    import klrl.runs.resume
    import klrl.train.evaluate
    import klrl.train.loop

    torch.set_num_threads(1)
    klrl.runs.curves.curves_figure([], "", klrl.domains.CONTROL)  # imports matplotlib


def make_model(folder: Path) -> None:
    """A language model of a few thousand parameters, which has hardly learned."""
    from benchmarks.sort_digits_base import Recipe, build

    small = {"hidden": 16, "layers": 1, "heads": 2, "batch": 8, "context": 64}
    build(Recipe(**small, measure_every=4, measure_on=8, target=0.0), folder)
