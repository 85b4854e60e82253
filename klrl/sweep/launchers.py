"""Runs a sweep's jobs on this machine: the launchers ``local`` and ``joblib``.

A launcher is a generator: it takes jobs, and yields notices and each job's outcome. If a second
signal stops the sweep, the generator is closed early. A launcher that runs jobs in other processes
passes a backend to ``supervisor.py``. The launchers ``submitit`` and ``ray`` are in ``queue.py``
and ``cluster.py``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from klrl.config import JoblibConfig, LauncherConfig
from klrl.runs.machine import cuda_devices
from klrl.sweep.jobs import Job, Notice, Outcome
from klrl.sweep.supervisor import Backend, Event, Lost, Supervisor
from klrl.sweep.worker import run_for, run_job


def local(config: LauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Event]:
    """``launcher=local``: run jobs one after the other, in this process."""
    for number, job in enumerate(jobs, 1):
        yield Notice(f"[{number}/{len(jobs)}] {job.name}")
        yield run_job(job)


def joblib(config: JoblibConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Event]:
    """``launcher=joblib``: run jobs on this machine's cores and GPUs, in loky processes."""
    devices = cuda_devices() if any(job.placed for job in jobs) else 0
    n_jobs = config.at_once(devices)
    slots = tuple(slot % devices for slot in range(n_jobs if devices else 0))
    if slots:
        yield Notice(f"jobs at once: {n_jobs}, on {', '.join(f'cuda:{d}' for d in slots)}")
    with TemporaryDirectory(prefix="klrl-locks-") as locks:
        yield from Supervisor(_Pool(n_jobs, Path(locks), slots), folder).run(jobs)


class _Pool(Backend):
    """Runs jobs in a pool of loky processes. If a process dies, loky ends the others, too."""

    def __init__(self, n_jobs: int, locks: Path, slots: Sequence[int]) -> None:
        self._n_jobs, self._locks, self._slots = n_jobs, locks, slots
        self._waiting: dict[str, Job] = {}  # jobs without an outcome, by name
        self._suspects: set[str] = set()
        self._outcomes: Generator[Outcome] | None = None  # of the current pool
        self._together: set[str] = set()  # names of the current pool's jobs
        self._began = 0.0

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Sequence[Event]:
        self._waiting = {**{job.name: job for job in jobs}, **self._waiting}
        self._suspects |= set(suspects)
        return ()

    def poll(self) -> Iterator[Event | Lost]:
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        if not self._waiting:  # the remaining jobs wait until their old processes are dead
            time.sleep(0.2)
            return
        if self._outcomes is None:
            self._outcomes = self._start()
        try:
            outcome = next(self._outcomes)
            del self._waiting[outcome.name]
            yield outcome
        except StopIteration:
            self._outcomes = None
        except TerminatedWorkerError:
            self._outcomes = None
            left = [job for name, job in self._waiting.items() if name in self._together]
            logs = [(job, job.log) for job in left if job.log.exists()]
            # Lost are the jobs whose log was opened since the pool started (or up to 1 s before).
            ran = [job for job, log in logs if log.stat().st_mtime > self._began - 1]
            for job in ran or left:
                del self._waiting[job.name]
                self._suspects.discard(job.name)
                yield Lost(job, "lost with their process (killed, or out of memory?)")

    def _start(self) -> Generator[Outcome]:
        from joblib import Parallel, delayed

        suspect = next((job for name, job in self._waiting.items() if name in self._suspects), None)
        # A suspect may kill its process; with n_jobs=1, joblib would run it in this process.
        n_jobs = self._n_jobs if suspect is None else 2
        pool = Parallel(n_jobs=n_jobs, backend="loky", return_as="generator_unordered")
        self._began = time.time()
        # Copy ``_waiting``: joblib reads the jobs while ``poll`` removes ended ones.
        together = list(self._waiting.values()) if suspect is None else [suspect]
        self._together = {job.name for job in together}
        run, also = delayed(run_for), (self._locks, self._slots)
        outcomes: Generator[Outcome] = pool([run(os.getpid(), job, *also) for job in together])
        return outcomes

    def close(self) -> None:
        if self._outcomes is not None:
            self._outcomes.close()
