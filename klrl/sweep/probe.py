"""Runs one job for some seconds in a process of its own, and measures the cost of its parts.

    python -m klrl.sweep.probe < request.json     {"settings": {...}, "seconds": 4}

The answer is the last line of stdout: a :class:`Cost` as JSON. The job runs twice: the extra time
of the first run is paid once per process, not once per job.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from klrl.config import JobConfig
from klrl.config.checks import to_config
from klrl.config.stored import typed
from klrl.train.callbacks import Callback

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from klrl.runs.metrics import Row
    from klrl.train.callbacks import Loop

#: Seconds of the first run, which measures only what a process pays once.
_FIRST_SECONDS = 0.2


@dataclass(frozen=True)
class Cost:
    """What the parts of a job take, in seconds and bytes.

    Attributes:
        start: imports, and all else that only the first job of a process pays.
        job: build, open and close, once per job.
        iteration: one rollout with its update and row.
        episode: one episode (response) of an evaluation.
        checkpoint: one checkpoint.
        memory: the process's peak memory, bytes.
        children: the peak memory of the largest child process (wandb's service), bytes.
        longest: steps of the longest episode; None: not known.
    """

    start: float
    job: float
    iteration: float
    episode: float
    checkpoint: float
    memory: int = 0
    children: int = 0
    longest: int | None = None


class _Timer(Callback):
    """Times a run, and stops it after some seconds of iterations, at least three.

    Args:
        seconds: how long to iterate.

    Attributes:
        evaluations, checkpoints: seconds of each.
        episodes: that were played in the evaluations.
        stamps: when each iteration ended, and the seconds of evaluations and checkpoints before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.evaluations: list[float] = []
        self.episodes = 0.0
        self.checkpoints: list[float] = []
        self.stamps: list[tuple[float, float]] = []

    @property
    def extra(self) -> float:
        """Seconds of evaluations and checkpoints so far."""
        return sum(self.evaluations) + sum(self.checkpoints)

    def evaluated(self, training: Loop, row: Row, seconds: float) -> None:
        self.evaluations.append(seconds)
        self.episodes += row["eval/episodes"] + row.get("eval/cut", 0)

    def saved(self, training: Loop, which: str, seconds: float) -> None:
        self.checkpoints.append(seconds)

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        self.stamps.append((time.perf_counter(), self.extra))
        if len(self.stamps) > 3 and self.stamps[-1][0] - self.stamps[0][0] > self._seconds:
            training.stop()


class Measured(NamedTuple):
    """A shortened run: its cost, its iterations, its seconds of evaluations and checkpoints."""

    cost: Cost
    iterations: int
    extra: float


def measure(config: JobConfig, seconds: float) -> Measured:
    """Run a job from its beginning and stop it after some seconds of iterations, at least three.

    It stops as by Ctrl-C; its temporary folder is deleted.
    """
    from klrl.base.errors import Interrupted
    from klrl.runs.folder import RunFolder
    from klrl.train.loop import Training  # torch, which only a measurement needs

    began = time.perf_counter()
    training, timer = Training(config), _Timer(seconds)
    with tempfile.TemporaryDirectory(prefix="klrl-plan-") as folder:
        with suppress(Interrupted):
            training.train(RunFolder(Path(folder)), callbacks=[timer])
        ended = time.perf_counter()
    (first, before), (last, after) = timer.stamps[0], timer.stamps[-1]
    rest = ended - began - timer.extra
    steps = len(timer.stamps) - 1
    iteration = (last - first - (after - before)) / steps if steps else rest
    if config.eval.on and not timer.episodes:
        training.evaluations.now()
    cost = Cost(
        start=0.0,
        job=max(rest - iteration * len(timer.stamps), 0.0),
        iteration=iteration,
        episode=sum(timer.evaluations) / max(timer.episodes, 1),
        checkpoint=_mean(timer.checkpoints),
        longest=training.parts.longest_episode,
    )
    return Measured(cost, len(timer.stamps), timer.extra)


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


def probe(settings: dict[str, Any], seconds: float) -> Cost:
    """Measure a job with these checked settings; its start counts from this process's own."""
    imported = _age()
    began = time.perf_counter()
    import torch

    config = to_config(typed(settings))
    config.logger = config.logger.offline()  # a probe must not appear in a wandb project
    torch.set_num_threads(config.threads)
    first = measure(config, _FIRST_SECONDS)
    through = time.perf_counter() - began
    cost = measure(config, seconds).cost
    here, below = (
        resource.getrusage(who).ru_maxrss * 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    # What the first run took beyond the cost of a later one in this process.
    once = through - (cost.job + first.iterations * cost.iteration + first.extra)
    return replace(cost, start=imported + max(once, 0.0), memory=here, children=below)


def _age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    request = json.load(sys.stdin)
    cost = probe(request["settings"], request["seconds"])
    print("\n" + json.dumps(asdict(cost)))
