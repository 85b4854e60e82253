"""Ctrl-C and SIGTERM while jobs run in other processes: passed on once; no new job begins."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from klrl.base.errors import Interrupted
from klrl.runs.folder import RunFolder, lives_here
from klrl.sweep.jobs import Job
from klrl.sweep.worker import STOP_FILE


@contextmanager
def passed_on(folder: Path, jobs: Callable[[], Sequence[Job]]) -> Iterator[list[int]]:
    """While entered, the first signal asks the running jobs to stop; a second one stops at once.

    Args:
        folder: the sweep's.
        jobs: those that may be running.

    Yields:
        The signals received so far.
    """
    received: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        if received:
            raise Interrupted(signum)
        received.append(signum)
        (folder / STOP_FILE).touch()
        pids = [pid for job in jobs() if (pid := _pid(job)) is not None]
        print(
            f"\nstopping {len(pids)} jobs after their iteration, with checkpoints; a second signal "
            "stops at once",
            file=sys.stderr,
            flush=True,
        )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        (folder / STOP_FILE).unlink(missing_ok=True)


def _pid(job: Job) -> int | None:
    """The id of the job's process, if it runs on this machine and is not this process."""
    run = RunFolder(job.folder)
    if not run.exists or run.manifest.get("status") != "running" or not lives_here(run.manifest):
        return None
    pid = int(run.manifest["pid"])
    return None if pid == os.getpid() else pid
