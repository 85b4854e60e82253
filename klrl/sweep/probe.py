"""Runs a job for some seconds in its own process, and measures the cost of its parts.

    python -m klrl.sweep.probe < request.json     {"settings": {...}, "seconds": 4, "started": ...}

``started``: when this process was started, in seconds since 1970. The last line of stdout is the
result, a :class:`Cost` as JSON.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from klrl.base.errors import Interrupted
from klrl.config.checks import to_config, typed
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.train.callbacks import Callback

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from klrl.runs.metrics import Row
    from klrl.train.callbacks import Loop


#: Seconds of the first run, which measures only the costs that a process pays once.
_FIRST_SECONDS = 0.2


@dataclass(frozen=True)
class Cost:
    """The cost of the parts of a job, in seconds and bytes."""

    start: float  # imports and other costs of the first job of a process
    job: float  # build, open and close
    iteration: float  # rollout, update and row
    episode: float  # of an evaluation (language: a response)
    checkpoint: float
    memory: int = 0  # peak of the process
    longest: int | None = None  # steps of the longest episode; None: not known


class _Timer(Callback):
    """Times a run, and stops it after some seconds of iterations, at least three."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.evaluations: list[float] = []
        self.episodes = 0.0
        self.checkpoints: list[float] = []
        self.stamps: list[float] = []  # ``now`` at the end of each iteration

    def now(self) -> float:
        """Return seconds without those of evaluations and checkpoints."""
        return time.perf_counter() - sum(self.evaluations) - sum(self.checkpoints)

    def evaluated(self, training: Loop, row: Row, seconds: float) -> None:
        self.evaluations.append(seconds)
        self.episodes += row["eval/episodes"] + row.get("eval/cut", 0)

    def saved(self, training: Loop, which: str, seconds: float) -> None:
        self.checkpoints.append(seconds)

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        self.stamps.append(self.now())
        if len(self.stamps) > 3 and self.stamps[-1] - self.stamps[0] > self._seconds:
            training.stop()


def probe(settings: dict[str, Any], seconds: float, started: float) -> Cost:
    """Run a job with checked settings twice, in temporary folders; stop it as by Ctrl-C.

    The extra time of the first run is what a process pays once.
    """
    import torch

    config = to_config(typed(settings))
    config.logger = config.logger.offline()  # a probe must not appear in a wandb project
    torch.set_num_threads(config.threads)
    importlib.import_module(domain_of(config).module)
    from klrl.train.loop import Training

    def run(timer: _Timer) -> tuple[float, Training]:
        began = timer.now()
        training = Training(config)
        with tempfile.TemporaryDirectory(prefix="klrl-plan-") as folder:
            with suppress(Interrupted):
                training.train(RunFolder(Path(folder)), callbacks=[timer])
            return timer.now() - began, training

    imported, first, timer = time.time() - started, _Timer(_FIRST_SECONDS), _Timer(seconds)
    took_first, _ = run(first)
    took, training = run(timer)
    steps = len(timer.stamps) - 1
    iteration = (timer.stamps[-1] - timer.stamps[0]) / steps if steps else took
    job = max(took - iteration * len(timer.stamps), 0.0)
    if config.eval.on and not timer.episodes:
        training.evaluations.now()
    return Cost(
        start=imported + max(took_first - job - iteration * len(first.stamps), 0.0),
        job=job,
        iteration=iteration,
        episode=sum(timer.evaluations) / max(timer.episodes, 1),
        checkpoint=fmean(timer.checkpoints or [0.0]),
        memory=_peak(),
        longest=training.parts.longest_episode,
    )


def _peak() -> int:
    """Return the peak memory in bytes; macOS counts in bytes, Linux in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    cost = probe(**request)
    print("\n" + json.dumps(asdict(cost)))
