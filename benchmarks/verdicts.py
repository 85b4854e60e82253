"""A verdict per check, in a line and as a record; for benchmarks/gpu.py."""

from __future__ import annotations

import contextlib
import io
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

from klrl.base.errors import in_one_line

#: Takes an empty folder; returns what to say, or raises SkipTest with the reason.
Check = Callable[[Path], str]


class Late(BaseException):
    """The time is up; no Exception, since klrl falls back to an eager update at any of those."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Late in the main thread when the time is up."""

    def ring(*_: object) -> None:
        raise Late("the time of all checks is over")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 5)  # again, where one is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict(name: str, check: Check, left: float) -> dict[str, Any]:
    """Run a check; its words stay out of the verdicts."""
    began, said, status = time.perf_counter(), io.StringIO(), "ok"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with deadline(left), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                told = check(Path(folder))
        except SkipTest as reason:
            status, told = "skip", str(reason)
        except (Exception, Late) as error:  # a check that fails in any way has failed
            said_by_us = isinstance(error, AssertionError | Late)
            status, told = "FAIL", str(error) if said_by_us else in_one_line(error)
    seconds = time.perf_counter() - began
    print(f"{status:4}  {name}: {told} ({seconds:.1f} s)", flush=True)
    return {"name": name, "status": status, "told": told, "seconds": round(seconds, 1)}
