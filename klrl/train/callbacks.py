"""The interface of hooks into the training loop."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any, Protocol

from tensordict import TensorDictBase

from klrl.base.errors import ConfigError
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


def check_hooks(callback: Callback) -> None:
    """Refuse a callback with a misspelt hook, or with a hook of another library (on_...)."""
    hooks = dict(inspect.getmembers(Callback, inspect.isfunction))
    for name, method in inspect.getmembers(type(callback), inspect.isfunction):
        near = get_close_matches(name, hooks, n=1, cutoff=0.8)
        typo = [each for each in near if _arguments(hooks[each]) == _arguments(method)]
        if name not in hooks and (typo or name.startswith("on_")):
            said = f"did you mean {typo[0]}?" if typo else f"hooks are {', '.join(hooks)}"
            raise ConfigError(f"callbacks={type(callback).__name__}.{name}: no such hook; {said}")


def _arguments(method: Any) -> int:
    return len(inspect.signature(method).parameters)
