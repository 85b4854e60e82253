"""Starts jobs on a backend, and restarts lost jobs while their checkpoints advance.

A :class:`Backend` starts processes, reports which jobs ended and why, and stops jobs. This module
decides if and when a lost job restarts.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from klrl.base.errors import WorkerError
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.owner import living_owner, read_owner
from klrl.sweep.jobs import Job, Notice, Outcome, Queued
from klrl.sweep.worker import STOP_FILE

#: A job fails after this many starts in a row without a new checkpoint.
IDLE_STARTS = 3


@dataclass(frozen=True)
class Lost:
    """A job that ended for an external reason, such as a machine's failure; it may be restarted."""

    job: Job
    why: str = "lost with their processes or machines"
    #: Frames or samples at each start of the job; None if the supervisor itself recorded them.
    starts: Sequence[int] | None = None
    #: True if its time limit ended the job; then it restarts only if it wrote a new checkpoint.
    at_limit: bool = False
    #: Its status if it is not restarted.
    status: str = "failed"


Event = Outcome | Queued | Notice


class Backend(Protocol):
    """Starts and stops the processes of jobs; one class per kind of launcher."""

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Iterable[Event]:
        """Start or restart jobs.

        A job in ``suspects`` fails if this start also ends without a new checkpoint. If the death
        of a job ends other jobs, too, the backend must run each suspect alone.
        """

    def poll(self) -> Iterable[Event | Lost]:
        """Wait briefly, and report the events since the last call.

        Raises:
            WorkerError: no machine is left to run jobs.
        """

    def stop(self) -> Iterable[Event]:
        """Ask running jobs to stop with a checkpoint; do not begin waiting jobs."""
        return ()

    def close(self) -> None:
        """End all jobs that are still running."""


class Supervisor:
    """Starts jobs on a backend until each has an outcome; restarts lost jobs."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend, self._folder = backend, folder
        self._open: dict[str, Job] = {}
        self._lost: list[Lost] = []  # to restart now
        self._held: dict[str, Job] = {}  # to restart once the owner of their folder is dead
        self._announced: set[str] = set()  # names of held jobs that were announced
        self._starts: dict[str, list[int]] = defaultdict(list)  # frames at each start

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run jobs; raise a WorkerError if no machine is left to run them."""
        # Clear ``queued`` for restarts: only the first start finds jobs already in SLURM's queue.
        self._open = {job.name: dataclasses.replace(job, queued=None) for job in jobs}
        asked = False
        try:
            yield from self._start(jobs)
            while self._open:
                if self._stopping and not asked:
                    asked = True
                    yield from self._backend.stop()
                yield from self._handled(self._backend.poll())
                yield from self._start_again()
        except WorkerError:
            for job in self._open.values():
                yield outcome_of(job, "no machine is left for it")
            if not self._stopping:
                raise
        finally:
            self._backend.close()

    @property
    def _stopping(self) -> bool:
        return (self._folder / STOP_FILE).exists()

    def _start(self, jobs: Sequence[Job]) -> Iterator[Event]:
        most = IDLE_STARTS - 1
        suspects = {job.name for job in jobs if idle_starts(job, self._starts[job.name]) >= most}
        for job in jobs:
            self._starts[job.name].append(RunFolder(job.folder).checkpointed)
        yield from self._handled(self._backend.submit(jobs, suspects))

    def _handled(self, events: Iterable[Event | Lost]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Notice | Queued):
                yield event
            elif isinstance(event, Outcome) and self._is_owned(event):
                yield from self._hold(event.name)
            else:
                outcome = event if isinstance(event, Outcome) else self._ended_by(event)
                if outcome is not None:
                    del self._open[outcome.name]
                    # Drop the signal: it ended this job, but not the sweep.
                    yield dataclasses.replace(outcome, signum=None)

    def _ended_by(self, lost: Lost) -> Outcome | None:
        """Return the outcome of a lost job; None if it will be restarted."""
        if self._stopping:
            return outcome_of(lost.job)
        starts = self._starts[lost.job.name] if lost.starts is None else lost.starts
        error = why_failed(lost.job, starts, lost.at_limit)
        if error is None:
            self._lost.append(lost)
            return None
        return Outcome(lost.job.name, lost.status, f"{error}; see {lost.job.log.name}")

    def _is_owned(self, outcome: Outcome) -> bool:
        """Return True if a restarted job was refused, since its lost process may still run."""
        again = len(self._starts[outcome.name]) > 1
        return outcome.status == "running elsewhere" and again and not self._stopping

    def _hold(self, name: str) -> Iterator[Notice]:
        job = self._held[name] = self._open[name]
        self._starts[name].pop()  # the refused start does not count
        owner = read_owner(job.folder)
        if owner is not None and name not in self._announced:
            self._announced.add(name)
            yield Notice(f"{name}: waits until {owner} is known to be dead")

    def _start_again(self) -> Iterator[Event]:
        """Restart lost jobs, and held jobs whose lost process is dead."""
        lost, self._lost = self._lost, []
        for why in dict.fromkeys(each.why for each in lost):
            names = [f"{e.job.name} (at {done(e.job)})" for e in lost if e.why == why]
            more = f" and {len(names) - 5} more" * (len(names) > 5)
            yield Notice(f"{why}; restarting: {', '.join(names[:5])}{more}")
        jobs = [each.job for each in lost]
        for name, job in list(self._held.items()):
            if self._stopping:
                del self._held[name], self._open[name]
                yield outcome_of(job)
            elif living_owner(job.folder) is None:
                jobs.append(self._held.pop(name))
        if jobs:
            yield from self._start(jobs)


def outcome_of(job: Job, error: str | None = None) -> Outcome:
    """Derive a job's outcome from its folder, since its process returned none."""
    run = RunFolder(job.folder)
    if run.exists and run.status == "finished":
        return Outcome(job.name, "finished")
    return Outcome(job.name, "interrupted" if run.exists else "waiting", error)


def done(job: Job) -> str:
    """Format the progress of a job's last checkpoint: ``6,400 frames``."""
    return f"{RunFolder(job.folder).checkpointed:,} {domain_of(job.config).axis}"


def idle_starts(job: Job, starts: Sequence[int]) -> int:
    """Count the latest starts in a row that began at the job's newest checkpoint."""
    frames = RunFolder(job.folder).checkpointed
    return next((i for i, each in enumerate(reversed(starts)) if each != frames), len(starts))


def why_failed(job: Job, starts: Sequence[int], at_limit: bool = False) -> str | None:
    """Say why a stopped job is not restarted; None while its checkpoints advance."""
    count = idle_starts(job, starts)
    if at_limit and count:
        return (
            f"its time limit came before a checkpoint beyond {done(job)}; give a larger "
            "launcher.timeout_min"
        )
    if count < IDLE_STARTS:
        return None
    return f"it was stopped {count} times in a row before a checkpoint beyond {done(job)}"
