"""Where the jobs of a sweep run. To add a launcher: a function here, its line in the registry.

A launcher takes jobs and yields each one's outcome as it ends; one with a queue also that jobs are
in it. The generator is closed early when a second signal stops the sweep. ``launcher=submitit`` is
in ``queue.py``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from klrl.config import SWEEP, JoblibConfig, LauncherConfig, RayLauncherConfig, factory
from klrl.sweep.jobs import Job, Outcome, Queued
from klrl.sweep.worker import run_job, run_logged

#: Seconds between polls of jobs in other processes.
_POLL = 0.2


def launch(config: LauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Outcome | Queued]:
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
            for outcome in pool([delayed(run_logged)(job) for job in together]):
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


def ray(config: RayLauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Outcome]:
    """``launcher=ray``: on a cluster (its address, or ``RAY_ADDRESS``), else on this machine."""
    from klrl.base.ray_start import start_ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not config.address and "RAY_ADDRESS" not in os.environ:
        options["num_cpus"] = config.cpus
    started = start_ray(config.address, **options)
    task = started.remote(run_logged).options(
        num_cpus=config.cpus_per_job, num_gpus=config.gpus_per_job, max_retries=1
    )
    running = {task.remote(job): job for job in jobs}
    try:
        while running:
            ended, _ = started.wait(list(running), num_returns=1, timeout=_POLL)
            for handle in ended:
                job = running.pop(handle)
                try:
                    yield started.get(handle)
                except started.exceptions.RayError as error:
                    yield Outcome(job.name, "failed", f"{type(error).__name__}: see {job.log.name}")
    finally:
        for handle in running:
            started.cancel(handle, force=True)
        started.shutdown()  # of a cluster: leaves it
