"""Stops a run on Ctrl-C, SIGTERM or similar, after the iteration and with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from klrl.base import ranks
from klrl.base.errors import Interrupted
from klrl.base.text import warn

#: If two of these signals arrive, the second stops the run at once.
_URGENT = (signal.SIGINT, signal.SIGTERM)
#: Signals that a queue may send before a job's time limit.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
#: Signals that the system may repeat, so a second signal does not stop the run at once. Both
#: kernel and shell send SIGHUP when a terminal closes. The kernel repeats SIGXCPU each second.
_NOTICES = (signal.SIGHUP, signal.SIGXCPU, *WARNINGS)

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def stop_signals(handler: Handler) -> Iterator[None]:
    """Let ``handler`` handle the signals that request a stop, inside the context.

    For signals other than SIGINT and SIGTERM, keep the handler of another library, and keep
    ignoring a signal that the process ignores (as with ``nohup``). Outside the main thread nothing
    changes, since Python handles signals only in the main thread.
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
    """Return whether ``signum`` stops the run at once, after the signal ``before``; warn if so.

    In a SLURM job only a second SIGINT stops the run at once, since SLURM repeats SIGTERM.
    """
    urgent = (signal.SIGINT,) if os.environ.get("SLURM_JOB_ID") else _URGENT
    at_once = signum in urgent and before in urgent
    if at_once:
        warn("")  # ends the line on which the terminal shows ^C
        warn("stopped at once; the last checkpoint is kept")
    return at_once


class StopRequest:
    """A context in which a signal requests a stop; a second signal may stop the run at once.

    The training loop calls :meth:`obey` between iterations, when parameters, optimiser and counters
    are consistent. Outside the main thread, signals have no effect, but :meth:`request` has.
    """

    def __init__(self) -> None:
        self.signum: int | None = None  # the signal that requested a stop

    def __enter__(self) -> StopRequest:
        self._signals = ExitStack()
        self._signals.enter_context(stop_signals(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    def agreed(self) -> bool:
        """Return whether a stop was requested, in any of the run's processes."""
        signum = ranks.agreed(self.signum)
        if signum is None:  # a signal that arrived meanwhile stops the next iteration
            return False
        self.signum = signum
        return True

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
            warn("")  # ends the line on which the terminal shows ^C
            warn(
                "stopping after this iteration, with a checkpoint; a second Ctrl-C or SIGTERM "
                "stops at once"
            )

    def obey(self) -> None:
        """Raise Interrupted if a stop was requested."""
        if self.signum is not None:
            raise Interrupted(self.signum)
