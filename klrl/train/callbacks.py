"""The interface of hooks into the training loop."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase

from klrl.config import JobConfig
from klrl.domains import Domain
from klrl.runs.checkpoint import Counters
from klrl.runs.metrics import Row
from klrl.runs.record import Recorder


class Loop(Protocol):
    """The part of :class:`klrl.train.loop.Training` that hooks may use."""

    config: JobConfig
    domain: Domain
    counters: Counters
    parts: Any
    recorder: Recorder

    def stop(self) -> None:
        """End the run after this iteration, with a checkpoint."""


class Callback:
    """Base class of hooks; override the methods that you need.

    A hook must not change training, but may call ``training.stop()``. An exception from a hook ends
    the run as failed; the last checkpoint is kept.
    """

    def started(self, training: Loop) -> None:
        """Called when the run is open, before its first evaluation or rollout."""

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        """Called after an iteration; ``row`` is a copy of the iteration's metrics.

        ``row`` has ``eval/return`` if the policy was evaluated and an episode ended. ``batch`` is
        the rollout, with charged rewards and with advantages.
        """

    def finished(self, training: Loop) -> None:
        """Called when the run is complete: all rows and the last checkpoint are written."""

    def ended(self, training: Loop) -> None:
        """Called when the run finished, stopped or failed; its files are still open."""
