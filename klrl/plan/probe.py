"""Runs one job for some seconds, in a process of its own, and tells what its parts took.

    python -m klrl.plan.probe < request.json     {"words": [...], "seconds": 4, ...}

The answer is the last line of stdout: a :class:`Cost` as JSON. The job runs twice: what the first
time takes longer is paid once per process, not once per job.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from klrl.config import JobConfig, WandbConfig

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


class _Clock:
    """Times calls of one kind."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - started)

        return timed

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds) if self.seconds else 0.0


class Measured(NamedTuple):
    """A run that was cut short: what its parts cost, how many iterations, seconds beside both."""

    cost: Cost
    iterations: int
    beside: float


def measure(config: JobConfig, seconds: float) -> Measured:
    """Run a job from its beginning and stop it after some seconds of iterations, at least three.

    It is stopped as Ctrl-C would stop it, in a temporary folder that does not stay.
    """
    from klrl.errors import Interrupted
    from klrl.experiment import make_experiment
    from klrl.run_folder import RunFolder

    began = time.perf_counter()
    training = make_experiment(config)  # type: ignore[arg-type]
    evaluation, checkpoint, stamps = _Clock(), _Clock(), []
    # The loop's own steps, timed from outside: nothing in the run knows that it is a probe.
    training.evaluation = evaluation.around(training.evaluation)  # type: ignore[method-assign]
    checkpoints, make_row = training._checkpoints, training.make_row

    def timed_checkpoints(files: RunFolder) -> Any:
        made = checkpoints(files)
        made.save = checkpoint.around(made.save)  # type: ignore[method-assign]
        return made

    def stamped_row(*args: Any, **kwargs: Any) -> Any:
        stamps.append((time.perf_counter(), sum(evaluation.seconds) + sum(checkpoint.seconds)))
        if len(stamps) > 3 and stamps[-1][0] - stamps[0][0] > seconds:
            signal.raise_signal(signal.SIGINT)
        return make_row(*args, **kwargs)

    training._checkpoints = timed_checkpoints  # type: ignore[method-assign]
    training.make_row = stamped_row  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="klrl-plan-") as folder:
        with suppress(Interrupted):
            training.train(RunFolder(Path(folder)))
        ended = time.perf_counter()
    (first, before), (last, after) = stamps[0], stamps[-1]
    iteration = (last - first - (after - before)) / max(len(stamps) - 1, 1)
    rest = ended - began - sum(evaluation.seconds) - sum(checkpoint.seconds)
    if config.eval.every and not evaluation.seconds:
        training.evaluation()
    cost = Cost(
        start=0.0,
        job=max(rest - iteration * len(stamps), 0.0),
        iteration=iteration,
        evaluation=evaluation.mean,
        checkpoint=checkpoint.mean,
        mode=str(getattr(training.learner, "mode", "false")),
    )
    return Measured(cost, len(stamps), sum(evaluation.seconds) + sum(checkpoint.seconds))


def probe(words: list[str], seconds: float, config_dir: str | None, name: str | None) -> Cost:
    """Measure a job whose words are given, in this process, from its start on."""
    imported = _age()
    began = time.perf_counter()
    import torch

    from klrl.compose import job_config

    config = job_config(words, config_dir, name)
    if isinstance(config.logger, WandbConfig):
        config.logger.mode = "offline"  # a probe is no run of anybody's project
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
    found = probe(asked["words"], asked["seconds"], asked["config_dir"], asked["config_name"])
    print("\n" + json.dumps(asdict(found)))
