"""``launcher=ray``: runs jobs as tasks of a Ray cluster, which may lose machines.

klrl restarts lost jobs itself: Ray would restart a job a fixed number of times, and print a page
each time. The owner file in a run folder tells whether the process of a lost job is dead.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from klrl.base.errors import ConfigError, WorkerError, last_line
from klrl.base.ray_start import start_ray
from klrl.config import LauncherConfig, RayLauncherConfig
from klrl.runs.owner import read_owner
from klrl.sweep.jobs import Job, Notice, Outcome
from klrl.sweep.supervisor import Backend, Event, Lost, Supervisor, outcome_of
from klrl.sweep.worker import run_logged

#: Seconds between polls for outcomes, and between checks of the machines.
_POLL, _LOOK = 0.2, 2.0
#: Seconds to wait for the cluster's head node; after 60 s, Ray would end klrl's process.
_HEADLESS = 30


def check_cluster(config: LauncherConfig) -> None:
    """Refuse a Ray cluster that does not answer."""
    if not isinstance(config, RayLauncherConfig):
        return
    setting = "launcher.address" if config.address else "RAY_ADDRESS"
    address = config.address or os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    if address in ("", "auto"):
        return
    if "/" in address or not host or not port.isdigit():
        raise ConfigError(
            f"{setting}={address}: give HOST:PORT as ray start --head prints it, or unset it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{setting}={address}: no Ray cluster answers there ({error}); "
            "run ray start --head on that machine, or unset it"
        ) from error


def ray(config: RayLauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Event]:
    """Run jobs on the cluster at ``launcher.address`` or ``RAY_ADDRESS``, else on this machine.

    Raises:
        WorkerError: Ray does not start, or the cluster has no machine left for the jobs.
    """
    alone = not config.address and "RAY_ADDRESS" not in os.environ
    options = {"num_cpus": config.cpus} if alone else {}
    with _quiet_ray(config.address, **options) as started:
        gpus = 0.0
        if started.cluster_resources().get("GPU") and any(job.placed for job in jobs):
            gpus = 1 / config.jobs_per_device
            fit = _room(started, config.cpus_per_job, gpus)
            yield Notice(f"jobs at once: {fit}, {config.jobs_per_device} on each Ray GPU")
        yield from Supervisor(_Tasks(config, started, gpus), folder).run(jobs)


class _Tasks(Backend):
    """The backend of a Ray cluster, with one task per job."""

    def __init__(self, config: RayLauncherConfig, started: Any, gpus: float) -> None:
        self._config, self._ray, self._gpus = config, started, gpus
        same = {"num_cpus": config.cpus_per_job, "max_retries": 0}
        # With GPUs, a process runs a single job (max_calls=1): it would run the next job on the
        # same GPU, even if Ray assigned a different GPU.
        self._tasks = {
            share: started.remote(num_gpus=share, max_calls=int(share > 0), **same)(run_logged)
            for share in (0.0, gpus)
        }
        self._running: dict[object, Job] = {}  # task handle -> job
        self._notices: list[str] = []
        self._looked = time.monotonic()
        self._short_since: float | None = None
        self._stopping = False

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Sequence[Event]:
        for job in jobs:
            self._running[self._tasks[self._gpus * job.placed].remote(job)] = job
        return ()

    def poll(self) -> Iterator[Event | Lost]:
        for handle in self._ready():
            yield self._ended(handle, self._running.pop(handle))
        if time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            self._check_machines()
        yield from map(Notice, self._notices)
        self._notices.clear()

    def _ready(self) -> Sequence[object]:
        """Wait until all tasks end, at most ``_POLL`` seconds; return the ended tasks."""
        if not self._running:  # the remaining jobs wait until their old processes are dead
            time.sleep(_POLL)
            return ()
        try:
            tasks = list(self._running)
            ready: list[object] = self._ray.wait(tasks, num_returns=len(tasks), timeout=_POLL)[0]
        except SystemError as error:  # Ray wraps a signal handler's exception in it
            raise error.__cause__ or error from None
        return ready

    def _ended(self, handle: object, job: Job) -> Outcome | Lost:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(handle)
        except (
            *(errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError),
            *(errors.LocalRayletDiedError, errors.ObjectLostError),
        ):
            return Lost(job)
        except errors.TaskCancelledError:  # ``stop`` cancelled the task
            return outcome_of(job)
        except errors.RayError as error:
            told = f"{type(error).__name__}: {last_line(error)}; see {job.log.name}"
            return Outcome(job.name, "failed", told)
        by_machine = outcome.signum not in (None, signal.SIGINT) and not self._stopping
        return Lost(job) if outcome.status == "interrupted" and by_machine else outcome

    def stop(self) -> Iterator[Event]:
        """Interrupt the jobs on other machines; they end with a checkpoint.

        Jobs on this machine have already received the signal that stops the sweep.
        """
        self._stopping, count = True, 0
        for handle, job in self._running.items():
            owner = read_owner(job.folder)
            if owner is not None and owner.host != platform.node():
                self._ray.cancel(handle, force=False)
                count += 1
        if count:
            yield Notice(f"also stopping jobs on other machines: {count}")

    def close(self) -> None:
        for handle in self._running:
            self._ray.cancel(handle, force=True)

    def _check_machines(self) -> None:
        """Raise a WorkerError if the machines or the head node have been missing for too long."""
        away = _headless(self._ray)
        missing = away or (self._no_room() if self._running else None)
        if missing is None:
            self._short_since = None
            return
        limit = min(self._config.cpus_timeout, _HEADLESS) if away else self._config.cpus_timeout
        if self._short_since is None:
            self._short_since = self._looked
            self._notices.append(f"{missing}: waiting up to {limit:g} s")
        if self._stopping or self._looked - self._short_since >= limit:
            raise WorkerError(
                f"launcher=ray: {missing}; fix that, and start the sweep again to continue it"
            )

    def _no_room(self) -> str | None:
        """Return an error message if no machine of the cluster is large enough for a job."""
        cpus = self._config.cpus_per_job
        gpus = self._gpus * any(job.placed for job in self._running.values())
        if _room(self._ray, cpus, gpus):
            return None
        with_gpus = " and a GPU" * (gpus > 0)
        return f"no machine of the Ray cluster has launcher.cpus_per_job={cpus:g}{with_gpus}"


# --------------------------------------------------------------------------------------------- Ray


@contextmanager
def _quiet_ray(address: str | None, **options: object) -> Iterator[ModuleType]:
    """Start or join Ray by :func:`start_ray`, silence its output, and shut it down at the end."""
    # Ray prints a paragraph about each process or machine that dies, and no setting prevents that.
    # If several processes fail, klrl raises the first error, and Ray would print all others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    import ray._private.worker as worker

    with ExitStack() as stack:
        stack.callback(setattr, worker, "print_to_stdstream", worker.print_to_stdstream)
        worker.print_to_stdstream = lambda *_, **__: None
        try:
            ray = start_ray(address, log_to_driver=False, logging_level="CRITICAL", **options)
        except Exception as error:  # Ray raises a bare Exception if it starts too slowly
            raise WorkerError(f"launcher=ray: Ray does not start: {last_line(error)}") from error
        stack.callback(ray.shutdown)
        yield ray


def _headless(ray: ModuleType) -> str | None:
    """Return an error message if the cluster's head node does not answer, else None."""
    # Connect to its port: most calls to Ray would block until the head node answers.
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return f"the head of the Ray cluster ({host}:{port}) does not answer"
    return None


def _room(ray: ModuleType, cpus: float, gpus: float = 0) -> int:
    """Count the jobs, each of ``cpus`` and ``gpus``, that the cluster could run at once if idle."""
    return sum(
        min(
            int(node["Resources"].get(kind, 0) / each + 1e-9)
            for kind, each in (("CPU", cpus), ("GPU", gpus))
            if each
        )
        for node in ray.nodes()
        if node["Alive"]
    )
