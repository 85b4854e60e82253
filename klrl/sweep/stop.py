"""Signals to stop while jobs run in other processes: passed on once; no new job begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from klrl.base.errors import Interrupted
from klrl.base.files import to_append
from klrl.base.interrupt import stop_signals, stops_at_once
from klrl.base.text import warn
from klrl.runs.folder import RunFolder
from klrl.runs.owner import lives_here
from klrl.sweep.jobs import Job
from klrl.sweep.worker import STOP_FILE


@contextmanager
def passed_on(
    folder: Path, jobs: Callable[[], Sequence[Job]], by_queue: bool = False
) -> Iterator[list[int]]:
    """While entered, the first signal asks running jobs to stop; a second one stops at once.

    Args:
        folder: the sweep's.
        jobs: those that may be running.
        by_queue: they are in a queue, which passes the signal on.

    Yields:
        The signals received so far.
    """
    received: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        if any(stops_at_once(signum, before) for before in received):
            raise Interrupted(signum)
        received.append(signum)
        if len(received) > 1:  # a notice came first; the jobs are stopping
            return
        with suppress(OSError):  # as on a full disk; the jobs are to stop all the same
            to_append(folder / STOP_FILE).close()
        pids = [] if by_queue else [pid for job in jobs() if (pid := _pid(job)) is not None]
        which = "the queue's" if by_queue else len(pids)
        warn("")
        warn(
            f"stopping {which} jobs after their iteration, with checkpoints; a second "
            "Ctrl-C or SIGTERM stops at once"
        )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    (folder / STOP_FILE).unlink(missing_ok=True)  # of a sweep that was killed while it stopped
    try:
        with stop_signals(ask):
            yield received
    finally:
        (folder / STOP_FILE).unlink(missing_ok=True)


def _pid(job: Job) -> int | None:
    """The process of a job that runs on this machine, in another process than this one."""
    run = RunFolder(job.folder)
    if not run.exists or run.manifest.get("status") != "running" or not lives_here(run.manifest):
        return None
    pid = int(run.manifest["pid"])
    return None if pid == os.getpid() else pid
