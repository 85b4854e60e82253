"""Hooks of a run: what plan's probe, the samples of a language run and users see of the loop."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase

from klrl.config import JobConfig
from klrl.domains import Domain
from klrl.runs.checkpoint import Counters
from klrl.runs.metrics import Row
from klrl.runs.record import Recorder


class Loop(Protocol):
    """What a hook sees of a run: :class:`klrl.train.loop.Training`."""

    config: JobConfig
    domain: Domain
    counters: Counters
    parts: Any
    recorder: Recorder

    def stop(self) -> None:
        """End the run in good order after this iteration."""


class Callback:
    """Override what you need; each hook does nothing by itself.

    A hook looks, and may call ``training.stop()``: the run ends in good order after the iteration.
    An exception from a hook ends the run as failed, with its last good checkpoint.
    """

    def started(self, training: Loop) -> None:
        """Everything is open; the first rollout comes next."""

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        """An iteration is done.

        Args:
            training: the run.
            row: what ``metrics.jsonl`` will get next; a copy.
            batch: the rollout, charged and with advantages.
        """

    def evaluated(self, training: Loop, row: Row, seconds: float) -> None:
        """An evaluation was made.

        Args:
            training: the run.
            row: has ``eval/return`` and its kin, unless no episode ended.
            seconds: that it took.
        """

    def saved(self, training: Loop, which: str, seconds: float) -> None:
        """A checkpoint was written: ``last`` or ``best``."""

    def finished(self, training: Loop) -> None:
        """All iterations are done, their rows and the last checkpoint written."""

    def ended(self, training: Loop) -> None:
        """The loop is over, in whatever way; files are still open."""
