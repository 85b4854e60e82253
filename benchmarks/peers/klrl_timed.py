"""klrl's public runner with a clock in it, for control and for language alike."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Clock

#: What of an iteration is booked as what; the rollout's ``collect`` as ``rollout``.
PHASES = {
    "estimate_advantage": "advantage",
    "charge_kl": "kl",
    "move_anchor": "kl",
    "learn": "update",
}


def timed(kind: type, clock: Clock, see: Callable[[Any, Any], None]) -> type:
    """A kind of experiment with its phases booked; an iteration ends where ``save`` begins.

    ``see(experiment, batch)`` is called with every rollout, before its row is made. Checkpoints,
    one before the first iteration and one at the end, are left out.
    """

    class Timed(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for step, phase in PHASES.items():
                setattr(self, step, clock.timed(phase, getattr(self, step)))
            self.begun = False

        def _make_rollout(self, *args: Any) -> Any:
            rollout = super()._make_rollout(*args)
            rollout.collect = clock.timed("rollout", rollout.collect)
            return rollout

        def make_row(self, batch: Any, *rest: Any) -> Any:
            see(self, batch)
            return super().make_row(batch, *rest)

        def save(self, *args: Any, **kwargs: Any) -> None:
            if self.begun:
                clock.lap()
            super().save(*args, **kwargs)
            clock.resume() if self.begun else clock.start()
            self.begun = True

    return Timed


def make_config(words: Sequence[str], clock: Clock) -> Any:
    """The job of a command line; klrl's imports end here."""
    import klrl.experiment  # noqa: F401
    from klrl.__main__ import compose
    from klrl.checks import to_config

    config = to_config(compose(list(words)))
    clock.import_seconds = clock.now()
    return config


def run_quietly(config: Any) -> None:
    """The run, in a folder that is thrown away; stdout is left for the line of JSON."""
    import klrl.experiment

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        klrl.experiment.run(config, Path(folder) / "run")
