"""Where the jobs of a sweep run. To add a launcher: a function here, its line in the registry.

A launcher takes jobs and yields each one's outcome as it ends, and what the user is told meanwhile;
one with a queue also that jobs are in it. The generator is closed early when a second signal stops
the sweep. ``launcher=submitit`` is in ``queue.py``, ``launcher=ray`` in ``cluster.py``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from klrl.config import SWEEP, JoblibConfig, LauncherConfig, factory
from klrl.sweep.jobs import Job, Notice, Outcome, Queued
from klrl.sweep.worker import run_for, run_job


def launch(
    config: LauncherConfig, jobs: Sequence[Job], folder: Path
) -> Iterator[Outcome | Queued | Notice]:
    """Run jobs with the chosen launcher.

    Args:
        config: the settings of ``launcher``.
        jobs: to run, in this order.
        folder: the sweep's.
    """
    return factory("launcher", config, SWEEP)(config, jobs, folder)


def local(config: LauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Outcome]:
    """``launcher=local``: one after the other, in this process."""
    for job in jobs:
        yield run_job(job)


def joblib(config: JoblibConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Outcome]:
    """``launcher=joblib``: on the cores of this machine, by joblib's loky processes.

    A process runs many jobs. When one dies (out of memory, a crash in native code), loky ends the
    others too. The jobs that were running are started again; one that was running at two deaths
    then runs alone, and if its process dies once more it has failed.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    waiting = {job.name: job for job in jobs}
    deaths: Counter[str] = Counter()
    while waiting:
        suspects = [job for job in waiting.values() if deaths[job.name] > 1]
        # A copy: joblib reads the list while outcomes are removed from ``waiting``.
        together = suspects[:1] or list(waiting.values())
        # joblib runs n_jobs=1 in this process, which must outlive a suspect.
        pool = Parallel(
            n_jobs=2 if suspects else config.n_jobs,
            backend="loky",
            return_as="generator_unordered",
        )
        started = time.time()
        try:
            for outcome in pool([delayed(run_for)(os.getpid(), job) for job in together]):
                del waiting[outcome.name]
                yield outcome
        except TerminatedWorkerError:
            if suspects:
                del waiting[suspects[0].name]
                yield _died(suspects[0])
            else:
                left = list(waiting.values())
                running = [job for job in left if _printed_since(job, started)]
                deaths.update(job.name for job in running or left)


def _printed_since(job: Job, when: float) -> bool:
    """Whether a job's log was opened since (in a second of tolerance for the disk's clock)."""
    return job.log.exists() and job.log.stat().st_mtime > when - 1


def _died(job: Job) -> Outcome:
    return Outcome(
        job.name, "failed", f"its process died (killed, or out of memory?); see {job.log.name}"
    )
