"""``launcher=ray``: runs jobs as tasks of a Ray cluster, which may lose machines.

klrl restarts lost jobs itself: Ray would do so a fixed number of times, and print a page about
each. The owner file in the run folder shows whether the lost process is dead.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from klrl.base.errors import WorkerError, last_line
from klrl.base.ray_start import HEADLESS, Shortage, check_address, headless, quiet_ray, room, wait
from klrl.config import LauncherConfig, RayLauncherConfig
from klrl.runs.owner import read_owner
from klrl.sweep.jobs import Job, Notice, Outcome
from klrl.sweep.supervisor import Backend, Event, Lost, supervise, without_outcome
from klrl.sweep.worker import run_logged

#: Seconds between polls for outcomes, and between counts of the machines.
_POLL, _LOOK = 0.2, 2.0


def check_cluster(config: LauncherConfig) -> None:
    """Refuse a Ray cluster that does not answer."""
    if isinstance(config, RayLauncherConfig):
        setting = "launcher.address" if config.address else "RAY_ADDRESS"
        check_address(config.address or os.environ.get("RAY_ADDRESS"), setting)


def ray(config: RayLauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Event]:
    """Run jobs on a cluster (its address, or ``RAY_ADDRESS``), else on this machine.

    Raises:
        WorkerError: Ray does not start, or the cluster has no machine left for the jobs.
    """
    alone = not config.address and "RAY_ADDRESS" not in os.environ
    options = {"num_cpus": config.cpus} if alone else {}
    with quiet_ray("launcher=ray", config.address, **options) as started:
        gpus = 0.0
        if started.cluster_resources().get("GPU") and any(job.placed for job in jobs):
            gpus = 1 / config.jobs_per_device
            fit = room(started, config.cpus_per_job, gpus)
            yield Notice(f"jobs at once: {fit}, {config.jobs_per_device} on each GPU of Ray's")
        yield from supervise(_Tasks(config, started, gpus), jobs, folder)


class _Tasks(Backend):
    """The backend of a Ray cluster, with one task per job."""

    def __init__(self, config: RayLauncherConfig, started: Any, gpus: float) -> None:
        self._config, self._ray, self._gpus = config, started, gpus
        same = {"num_cpus": config.cpus_per_job, "max_retries": 0}
        # A process keeps its first GPU, even if Ray assigns a different one to its next job.
        self._tasks = {
            share: started.remote(num_gpus=share, max_calls=int(share > 0), **same)(run_logged)
            for share in (0.0, gpus)
        }
        self._running: dict[object, Job] = {}  # task handle -> job
        self._notices: list[str] = []
        self._shortage = Shortage(config.cpus_timeout, self._notices.append)
        self._headless = Shortage(min(config.cpus_timeout, HEADLESS), self._notices.append)
        self._looked = time.monotonic()
        self._stopping = False

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Sequence[Event]:
        for job in jobs:
            self._running[self._tasks[self._gpus * job.placed].remote(job)] = job
        return ()

    def poll(self) -> Iterator[Event | Lost]:
        if not self._running:  # all open jobs may still be running elsewhere
            time.sleep(_POLL)
        for handle in wait(self._ray, list(self._running), _POLL) if self._running else ():
            yield self._ended(handle, self._running.pop(handle))
        if time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            self._check_machines()
        yield from map(Notice, self._notices)
        self._notices.clear()

    def _ended(self, handle: object, job: Job) -> Outcome | Lost:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(handle)
        except (
            *(errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError),
            *(errors.LocalRayletDiedError, errors.ObjectLostError),
        ):
            return Lost(job)
        except errors.TaskCancelledError:  # see stop
            return without_outcome(job)
        except errors.RayError as error:
            told = f"{type(error).__name__}: {last_line(error)}; see {job.log.name}"
            return Outcome(job.name, "failed", told)
        by_machine = outcome.signum not in (None, signal.SIGINT) and not self._stopping
        return Lost(job) if outcome.status == "interrupted" and by_machine else outcome

    def stop(self) -> Iterator[Event]:
        """Stop the jobs on other machines; those on this machine got the signal themselves.

        Ray raises SIGINT in their processes, and they end with a checkpoint.
        """
        self._stopping, count = True, 0
        for handle, job in self._running.items():
            owner = read_owner(job.folder)
            if owner is not None and owner.host != platform.node():
                self._ray.cancel(handle, force=False)
                count += 1
        if count:
            yield Notice(f"likewise jobs on other machines: {count}")

    def close(self) -> None:
        for handle in self._running:
            self._ray.cancel(handle, force=True)

    def _check_machines(self) -> None:
        """Raise a WorkerError if machines or the head have been missing for too long."""
        away = headless(self._ray)
        missing = None if away or not self._running else self._no_room()
        ends = self._headless.lasts(away) or self._shortage.lasts(missing)
        if ends or ((away or missing) and self._stopping):
            raise WorkerError(
                f"launcher=ray: {away or missing}; started again when that has changed, the "
                "sweep goes on"
            )

    def _no_room(self) -> str | None:
        """An error message if no living machine is large enough for a job, else None."""
        cpus = self._config.cpus_per_job
        gpus = self._gpus * any(job.placed for job in self._running.values())
        if room(self._ray, cpus, gpus):
            return None
        with_gpus = " and a GPU" * (gpus > 0)
        return f"no machine of the Ray cluster has launcher.cpus_per_job={cpus:g}{with_gpus}"
