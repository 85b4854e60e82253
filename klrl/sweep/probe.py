"""Runs one job for some seconds, in a process of its own, and tells what its parts took.

    python -m klrl.plan.probe < request.json     {"settings": {...}, "seconds": 4}

The answer is the last line of stdout: a :class:`Cost` as JSON. The job runs twice: what the first
time takes longer is paid once per process, not once per job.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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

#: Of the first run, which is there for what a process pays once.
_FIRST_SECONDS = 0.2


@dataclass(frozen=True)
class Cost:
    """Seconds that the parts of a job take, and bytes.

    Attributes:
        start: a process's imports and all else that its first job alone pays.
        job: build, open, close: once per job.
        iteration: a rollout with its update and row.
        evaluation: one.
        checkpoint: one.
        memory: the process's peak, bytes.
        children: the peak of the largest child process (wandb's service), bytes.
        mode: how the update runs.
    """

    start: float
    job: float
    iteration: float
    evaluation: float
    checkpoint: float
    memory: int = 0
    children: int = 0
    mode: str = "false"


class _Watch(Callback):
    """Times a run, and ends it after some seconds of iterations, at least three.

    Args:
        seconds: of iterations.

    Attributes:
        evaluations, checkpoints: seconds of each.
        stamps: when each iteration was done, and the seconds of evaluations and checkpoints before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.evaluations: list[float] = []
        self.checkpoints: list[float] = []
        self.stamps: list[tuple[float, float]] = []

    @property
    def beside(self) -> float:
        """Seconds of evaluations and checkpoints so far."""
        return sum(self.evaluations) + sum(self.checkpoints)

    def evaluated(self, training: Loop, row: Row, seconds: float) -> None:
        self.evaluations.append(seconds)

    def saved(self, training: Loop, which: str, seconds: float) -> None:
        self.checkpoints.append(seconds)

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        self.stamps.append((time.perf_counter(), self.beside))
        if len(self.stamps) > 3 and self.stamps[-1][0] - self.stamps[0][0] > self._seconds:
            training.stop()


class Measured(NamedTuple):
    """A run that was cut short: what its parts cost, how many iterations, seconds beside both."""

    cost: Cost
    iterations: int
    beside: float


def measure(config: JobConfig, seconds: float) -> Measured:
    """Run a job from its beginning and stop it after some seconds of iterations, at least three.

    It is stopped as Ctrl-C would stop it, in a temporary folder that does not stay.
    """
    from klrl.base.errors import Interrupted
    from klrl.runs.folder import RunFolder
    from klrl.train.loop import Training  # torch, which only a measurement needs

    began = time.perf_counter()
    training, watch = Training(config), _Watch(seconds)
    with tempfile.TemporaryDirectory(prefix="klrl-plan-") as folder:
        with suppress(Interrupted):
            training.train(RunFolder(Path(folder)), callbacks=[watch])
        ended = time.perf_counter()
    (first, before), (last, after) = watch.stamps[0], watch.stamps[-1]
    iteration = (last - first - (after - before)) / max(len(watch.stamps) - 1, 1)
    rest = ended - began - watch.beside
    evaluations = watch.evaluations
    if config.eval.every and not evaluations:
        evaluations = [_seconds_of(training.parts.evaluation)]
    cost = Cost(
        start=0.0,
        job=max(rest - iteration * len(watch.stamps), 0.0),
        iteration=iteration,
        evaluation=_mean(evaluations),
        checkpoint=_mean(watch.checkpoints),
        mode=training.parts.learner.steps.mode,
    )
    return Measured(cost, len(watch.stamps), watch.beside)


def _seconds_of(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


def probe(settings: dict[str, Any], seconds: float) -> Cost:
    """Measure a job whose checked settings are given, in this process, from its start on."""
    imported = _age()
    began = time.perf_counter()
    import torch

    config = to_config(typed(settings))
    config.logger = config.logger.offline()  # a probe is no run of anybody's project
    torch.set_num_threads(config.threads)
    first = measure(config, _FIRST_SECONDS)
    through = time.perf_counter() - began
    cost = measure(config, seconds).cost
    here, below = (
        resource.getrusage(who).ru_maxrss * 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    # Of the first run, what a later one in this process would not have paid.
    once = through - (cost.job + first.iterations * cost.iteration + first.beside)
    return replace(cost, start=imported + max(once, 0.0), memory=here, children=below)


def _age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    found = probe(asked["settings"], asked["seconds"])
    print("\n" + json.dumps(asdict(found)))
