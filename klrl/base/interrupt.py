"""On Ctrl-C, SIGTERM and the like: finish the iteration, write the checkpoint, then stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from klrl.base.errors import Interrupted
from klrl.base.text import warn

#: Signals of which a second stops the run at once.
_URGENT = (signal.SIGINT, signal.SIGTERM)
#: Signals that may repeat without the user, so that a second must not stop the run at once: SIGHUP
#: from the kernel and from the shell when a terminal is closed, SIGXCPU every second after the soft
#: limit, and the WARNINGS from a queue whose time limit is near.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_NOTICES = (signal.SIGHUP, signal.SIGXCPU, *WARNINGS)

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def stop_signals(handler: Handler) -> Iterator[None]:
    """Inside the context, ``handler`` handles all signals that request a stop.

    A notice that is ignored (as by ``nohup``), or that another library handles, is left alone.
    Outside the main thread nothing changes: Python delivers no signals there.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for each in (*_URGENT, *_NOTICES):
            handled = signal.getsignal(each)
            ours = str(getattr(handled, "__module__", "")).startswith("klrl.")
            if each in _URGENT or handled is signal.SIG_DFL or ours:
                before[each] = signal.signal(each, handler)
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def stops_at_once(signum: int, before: int | None) -> bool:
    """Whether a signal that follows ``before`` stops the run without a checkpoint; warns if so.

    SLURM sends SIGTERM when a job's grace period begins, and several times when the period ends.
    """
    urgent = (signal.SIGINT,) if os.environ.get("SLURM_JOB_ID") else _URGENT
    at_once = signum in urgent and before in urgent
    if at_once:
        warn("")  # below ^C and the live line
        warn("stopped at once; the last checkpoint is kept")
    return at_once


class StopRequest:
    """Inside the context, a signal requests a stop; a second SIGINT or SIGTERM stops at once.

    The loop calls :meth:`obey` between iterations, where parameters, optimiser and counters are
    consistent. Outside the main thread use :meth:`request`.
    """

    def __init__(self) -> None:
        self.signum: int | None = None  # the signal that arrived

    def __enter__(self) -> StopRequest:
        self._signals = ExitStack()
        self._signals.enter_context(stop_signals(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self.signum is not None

    def request(self) -> None:
        """Request a stop, as Ctrl-C does."""
        self.signum = self.signum or signal.SIGINT

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        before = self.signum
        if stops_at_once(signum, before):
            raise Interrupted(signum)
        if before is None or signum in _URGENT:
            self.signum = signum
        if before is None:
            warn("")  # below ^C and the live line
            warn(
                "stopping after this iteration, with a checkpoint; a second Ctrl-C or SIGTERM "
                "stops at once"
            )

    def obey(self) -> None:
        """Stop if a stop was requested.

        Raises:
            Interrupted: a signal arrived, or :meth:`request` was called.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)
