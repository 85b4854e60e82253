"""Ctrl-C, SIGTERM and their kin: finish the iteration, write the checkpoint, then stop."""

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

#: A second one of these stops at once.
_URGENT = (signal.SIGINT, signal.SIGTERM)
#: These come in numbers by themselves: SIGHUP from the kernel and the shell when a terminal is
#: closed, SIGXCPU every second from the soft limit on, the others from a queue whose time limit is
#: near.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_NOTICES = (signal.SIGHUP, signal.SIGXCPU, *WARNINGS)

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def stop_signals(handler: Handler) -> Iterator[None]:
    """While entered, a handler takes all signals that ask a run to stop.

    A notice that is ignored (as by ``nohup``), or that another library handles, is left alone.
    Outside the main thread Python delivers no signals, and nothing is changed.
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
    """Whether a signal that follows another is to stop a run without its checkpoint; says so.

    SLURM sends SIGTERM to a job when its time to end begins, and several times when it is over.
    """
    urgent = (signal.SIGINT,) if os.environ.get("SLURM_JOB_ID") else _URGENT
    at_once = signum in urgent and before in urgent
    if at_once:
        warn("")  # below ^C and the live line
        warn("stopped at once; the last checkpoint is kept")
    return at_once


class StopRequest:
    """While entered, a signal requests a stop; a second SIGINT or SIGTERM stops at once.

    The loop calls :meth:`obey` between iterations, where parameters, optimiser and counters are
    consistent. Outside the main thread use :meth:`request`.
    """

    def __init__(self) -> None:
        self.signum: int | None = None  # the signal that came

    def __enter__(self) -> StopRequest:
        self._signals = ExitStack()
        self._signals.enter_context(stop_signals(self._ask))
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

    def _ask(self, signum: int, frame: FrameType | None) -> None:
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
        """Stop if it was requested.

        Raises:
            Interrupted: a signal came, or :meth:`request` was called.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)
