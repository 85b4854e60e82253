"""klrl's public runner with a clock in it, for control and for language alike."""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Clock

#: What of an iteration is booked as what; the rollout's ``collect`` as ``rollout``.
PHASES = {"update_penalty": "kl", "learn": "update"}
PHASES_OF_PARTS = {"estimate_advantage": "advantage", "charge_kl": "kl"}


def time_training(clock: Clock, see: Callable[[Any, Any], None] = lambda *_: None) -> None:
    """Book the phases of the runs to come; an iteration ends where ``save`` begins.

    ``see(training, batch)`` is called with every rollout, before its row is made. Checkpoints,
    one before the first iteration and one at the end, are left out.
    """

    import klrl.train.loop

    class Timed(klrl.train.loop.Training):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for owner, phases in ((self, PHASES), (self.parts, PHASES_OF_PARTS)):
                for step, phase in phases.items():
                    setattr(owner, step, clock.timed(phase, getattr(owner, step)))
            make, self.begun = self.parts.rollout, False

            def timed_rollout(*args: Any) -> Any:
                rollout = make(*args)
                rollout.collect = clock.timed("rollout", rollout.collect)
                return rollout

            self.parts.rollout = timed_rollout

        def make_row(self, batch: Any, *rest: Any) -> Any:
            see(self, batch)
            return super().make_row(batch, *rest)

        def save(self, *args: Any, **kwargs: Any) -> None:
            if self.begun:
                clock.lap()
            super().save(*args, **kwargs)
            clock.resume() if self.begun else clock.start()
            self.begun = True

    klrl.train.loop.Training = Timed


def make_config(words: Sequence[str], clock: Clock) -> Any:
    """The job of a command line; klrl's imports end here, as those of ``klrl run`` do."""
    from klrl.base.imports import import_for_good
    from klrl.config.checks import to_config
    from klrl.config.compose import compose
    from klrl.config.own import complete
    from klrl.domains import domain_of

    config = to_config(compose(list(words)))
    complete(config)
    gc.collect()  # what importing torch here left
    import_for_good("klrl.train.loop", domain_of(config).module)
    clock.import_seconds = clock.now()
    return config


def run_quietly(config: Any) -> None:
    """The run, in a folder that is thrown away; stdout is left for the line of JSON."""
    from klrl.runs.folder import RunFolder
    from klrl.train.loop import start

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        start(config, RunFolder(Path(folder) / "run"))
