"""Calls optional parts of a run (wandb, progress, pictures); their failure does not end the run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from klrl.base.errors import FAULTS, OwnerError, in_one_line
from klrl.base.text import warn

STREAMS = ("stdout", "stderr")

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Calls optional parts of a run; reports and notes a part's first failure, then skips the part.

    Args:
        note: called with the name and the error of a part that fails.
        instead: end of the message about a failure: what klrl does now.
    """

    def __init__(
        self, note: Callable[[str, str], object], instead: str = "training goes on"
    ) -> None:
        self._note, self._instead = note, instead
        self._failed: set[str] = set()
        self._lock = threading.Lock()  # the progress line has its own thread

    def call(
        self, part: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call a function of a part, unless the part failed before; return None after a failure."""
        if part in self._failed:
            return None
        try:
            return function(*args, **kwargs)
        except FAULTS as error:
            self.failed(part, error)
            return None

    def has_failed(self, part: str) -> bool:
        """Return True if a part has failed."""
        return part in self._failed

    def failed(self, part: str, error: BaseException, instead: str | None = None) -> None:
        """Report and note a failure, once per part; ``instead`` replaces the message's end."""
        with self._lock:
            if part in self._failed:
                return
            self._failed.add(part)
            line = in_one_line(error)
            if part not in STREAMS:  # klrl.base.streams has reported these
                with suppress(ValueError):
                    warn(f"klrl: {part}: {line}; {instead or self._instead}")
            # On a full disk, or in a moved folder, the note cannot be written either.
            with suppress(OSError, ValueError, OwnerError):
                self._note(part, line)

    def check_streams(self) -> None:
        """Note a failure of stdout or stderr, which :mod:`klrl.base.streams` has reported."""
        for name in STREAMS:
            error = getattr(getattr(sys, name), "error", None)
            if error is not None:
                self.failed(name, error)
