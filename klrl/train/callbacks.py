"""Hooks of a run: what plan's probe, the samples of a language run and users see of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from klrl.runs.metrics import Row
    from klrl.train.loop import Training


class Callback:
    """Override what you need; each hook does nothing by itself.

    A hook looks, and may call ``training.stop()``: the run ends in good order after the iteration.
    An exception from a hook ends the run as failed, with its last good checkpoint.
    """

    def started(self, training: Training) -> None:
        """Everything is open; the first rollout comes next."""

    def iterated(self, training: Training, row: Row, batch: TensorDictBase) -> None:
        """An iteration is done.

        Args:
            training: the run.
            row: what ``metrics.jsonl`` will get next; a copy.
            batch: the rollout, charged and with advantages.
        """

    def evaluated(self, training: Training, row: Row, seconds: float) -> None:
        """An evaluation was made; ``row`` has ``eval/return`` and its kin."""

    def saved(self, training: Training, which: str, seconds: float) -> None:
        """A checkpoint was written: ``last`` or ``best``."""

    def ended(self, training: Training) -> None:
        """The loop is over, in whatever way; files are still open."""
