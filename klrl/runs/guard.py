"""What serves a run but may not end it: wandb, the printed progress, pictures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from klrl.base.errors import in_one_line

STREAMS = ("stdout", "stderr")

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Calls the parts that serve a run. One that fails is told on stderr, noted, and left out.

    Args:
        note: takes a part's name and its error, for the manifest.
        instead: what klrl does where a part has failed.
    """

    def __init__(
        self, note: Callable[[str, str], object], instead: str = "training goes on"
    ) -> None:
        self._note, self._instead = note, instead
        self._failed: set[str] = set()
        self._lock = threading.Lock()  # the progress prints from a thread of its own

    def call(
        self, part: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """What a function of a part returns; None where its part has failed, now or before."""
        if part in self._failed:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.failed(part, error)
            return None

    def has_failed(self, part: str) -> bool:
        """Whether a part has failed."""
        return part in self._failed

    def failed(self, part: str, error: Exception, instead: str | None = None) -> None:
        """Tell and note a failure, once per part; ``instead`` is what klrl does now."""
        with self._lock:
            if part in self._failed:
                return
            self._failed.add(part)
            line = in_one_line(error)
            if part not in STREAMS:  # those say so themselves
                with suppress(OSError, ValueError):
                    told = f"klrl: {part}: {line}; {instead or self._instead}"
                    print(told, file=sys.stderr, flush=True)
            with suppress(OSError, ValueError):  # as on a full disk: training finds out by itself
                self._note(part, line)

    def check_streams(self) -> None:
        """Note it where stdout or stderr cannot be written; :mod:`klrl.base.streams` told it."""
        for name in STREAMS:
            error = getattr(getattr(sys, name), "error", None)
            if error is not None:
                self.failed(name, error)
