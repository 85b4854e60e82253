"""Ctrl-C and SIGTERM: finish the iteration, write the checkpoint, then stop."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from klrl.base.errors import Interrupted


class StopRequest:
    """While entered, the first SIGINT or SIGTERM requests a stop; a second one stops at once.

    The loop calls :meth:`obey` between iterations, where parameters, optimiser and counters are
    consistent. Outside the main thread Python delivers no signals; use :meth:`request` there.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self.signum is not None

    def request(self) -> None:
        """Request a stop, as Ctrl-C does."""
        self.signum = self.signum or signal.SIGINT

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise Interrupted(signum)
        self.signum = signum
        print(
            "\nstopping after this iteration, with a checkpoint; a second signal stops at once",
            file=sys.stderr,
            flush=True,
        )

    def obey(self) -> None:
        """Stop if it was requested.

        Raises:
            Interrupted: a signal came, or :meth:`request` was called.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)
