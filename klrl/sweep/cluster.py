"""``launcher=ray``: jobs as tasks of a Ray cluster, which may lose machines.

A job whose process or machine is lost goes on elsewhere from its last checkpoint, as long as its
checkpoints advance. Ray could start it again itself: it would do so a fixed number of times, and
tell a page about each. Whether the lost process is dead is for the run folder's owner file to say.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError, WorkerError, last_line
from klrl.base.ray_start import HEADLESS, Shortage, check_address, headless, quiet_ray, room, wait
from klrl.config import LauncherConfig, RayLauncherConfig
from klrl.runs.folder import RunFolder
from klrl.runs.owner import read_owner
from klrl.sweep.jobs import Job, Notice, Outcome, done, stuck
from klrl.sweep.worker import STOP_FILE, run_logged

#: Seconds between looks for outcomes; between counts of the machines, and looks at owners.
_POLL, _LOOK = 0.2, 2.0


def check_cluster(config: LauncherConfig) -> None:
    """Refuse a Ray cluster that does not answer.

    Raises:
        ConfigError: ``launcher.address`` or ``RAY_ADDRESS`` is malformed, or nobody is there.
    """
    if isinstance(config, RayLauncherConfig):
        if config.address:
            check_address(config.address, "launcher.address")
        else:
            check_address(os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")


def ray(config: RayLauncherConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Outcome | Notice]:
    """Run jobs on a cluster (its address, or ``RAY_ADDRESS``), else on this machine.

    Raises:
        ConfigError: a job does not fit on this machine.
        WorkerError: Ray does not start; no machine of the cluster is left for the jobs.
    """
    options: dict[str, Any] = {}
    alone = not config.address and "RAY_ADDRESS" not in os.environ
    if alone:
        options["num_cpus"] = config.cpus
    with quiet_ray("launcher=ray", config.address, **options) as started:
        if alone and not room(started, config.cpus_per_job, config.gpus_per_job):
            raise ConfigError(
                f"launcher.cpus_per_job={config.cpus_per_job:g}, "
                f"launcher.gpus_per_job={config.gpus_per_job:g}: Ray on this machine has "
                f"{started.cluster_resources().get('CPU', 0):g} CPUs and "
                f"{started.cluster_resources().get('GPU', 0):g} GPUs; lower them, or give a "
                "cluster's launcher.address"
            )
        yield from _Tasks(config, folder, started).run(jobs)


class _Tasks:
    """The jobs of a sweep as tasks of a cluster.

    Args:
        config: the settings of the launcher.
        folder: the sweep's.
        started: Ray.
    """

    def __init__(self, config: RayLauncherConfig, folder: Path, started: Any) -> None:
        self._config, self._folder, self._ray = config, folder, started
        self._task = started.remote(run_logged).options(
            num_cpus=config.cpus_per_job, num_gpus=config.gpus_per_job, max_retries=0
        )
        self._running: dict[Any, Job] = {}  # by the handle of its task
        self._held: dict[str, Job] = {}  # lost, but their owner may live
        self._told: set[str] = set()  # of those, whose owner was told
        self._starts: dict[str, list[int]] = {}  # name -> frames that each start went on from
        self._notices: list[str] = []
        self._shortage = Shortage(config.cpus_timeout, self._notices.append)
        self._headless = Shortage(min(config.cpus_timeout, HEADLESS), self._notices.append)
        self._looked = time.monotonic()
        self._passed_on = False

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome | Notice]:
        """Start all jobs, and those that are lost again; wait for all.

        Raises:
            WorkerError: no machine is left for them.
        """
        for job in jobs:
            self._start(job)
        try:
            while self._running or self._held:
                yield from self._ended()
                if self._stopping and not self._passed_on:
                    self._pass_on()
                if time.monotonic() - self._looked > _LOOK:
                    self._looked = time.monotonic()
                    yield from self._look()
                yield from map(Notice, self._notices)
                self._notices.clear()
        finally:
            for handle in self._running:
                self._ray.cancel(handle, force=True)

    @property
    def _stopping(self) -> bool:
        return (self._folder / STOP_FILE).exists()

    def _start(self, job: Job) -> None:
        self._starts.setdefault(job.name, []).append(RunFolder(job.folder).checkpointed)
        self._running[self._task.remote(job)] = job

    def _ended(self) -> Iterator[Outcome]:
        """The outcomes of tasks that ended; jobs that were lost start again."""
        ended: list[Any] = []
        if self._running:
            ended = wait(self._ray, list(self._running), _POLL)
        else:
            time.sleep(_POLL)
        lost: list[Job] = []
        for handle in ended:
            job = self._running.pop(handle)
            outcome = self._outcome(handle, job)
            if outcome is not None and self._is_owned(outcome):
                self._hold(job)
            elif outcome is not None:
                yield outcome
            elif (error := stuck(job, self._starts[job.name])) is not None:
                yield Outcome(job.name, "failed", f"{error}; see {job.log.name}")
            else:
                lost.append(job)
        if lost:
            names = _some([f"{job.name} (at {done(job)})" for job in lost])
            self._notices.append(f"lost with their processes or machines, to go on: {names}")
        for job in lost:
            self._start(job)

    def _outcome(self, handle: Any, job: Job) -> Outcome | None:
        """How a task ended; None where its process or its machine was lost."""
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(handle)
        except (
            *(errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError),
            *(errors.LocalRayletDiedError, errors.ObjectLostError),
        ):
            return None
        except errors.TaskCancelledError:  # see _pass_on
            run = RunFolder(job.folder)
            status = run.status if run.exists else "waiting"
            return Outcome(job.name, "finished" if status == "finished" else "interrupted")
        except errors.RayError as error:
            told = f"{type(error).__name__}: {last_line(error)}; see {job.log.name}"
            return Outcome(job.name, "failed", told)
        if outcome.signum in (None, signal.SIGINT) or self._stopping:
            return outcome
        if outcome.status == "interrupted":
            return None  # its machine was told to stop
        return dataclasses.replace(outcome, signum=None)  # which is none to the sweep

    # ------------------------------------------------------------------ stopping

    def _pass_on(self) -> None:
        """Ask the jobs on other machines to stop, as a signal does; it reaches those of this one.

        Ray raises SIGINT in their processes, and they end with a checkpoint.
        """
        self._passed_on, count = True, 0
        for handle, job in self._running.items():
            owner = read_owner(job.folder)
            if owner is not None and owner.host != platform.node():
                self._ray.cancel(handle, force=False)
                count += 1
        if count:
            self._notices.append(f"likewise jobs on other machines: {count}")

    # ------------------------------------------------------------------ owners, machines

    def _is_owned(self, outcome: Outcome) -> bool:
        """Whether a job that was lost is still being run, as far as its new machine can tell."""
        return outcome.status == "running elsewhere" and len(self._starts[outcome.name]) > 1

    def _hold(self, job: Job) -> None:
        self._starts[job.name].pop()  # it was no start
        owner = read_owner(job.folder)
        if owner is not None and job.name not in self._told:
            self._told.add(job.name)
            self._notices.append(f"{job.name}: waits until {owner} is known to be dead")
        self._held[job.name] = job

    def _look(self) -> Iterator[Outcome]:
        """Start held jobs whose owner is dead; count the machines.

        Raises:
            WorkerError: there was none for too long, or no head.
        """
        for job in list(self._held.values()):
            owner = read_owner(job.folder)
            if self._stopping:
                yield Outcome(self._held.pop(job.name).name, "interrupted")
            elif owner is None or not owner.alive:
                self._start(self._held.pop(job.name))
        away = headless(self._ray)
        missing = None if away or not self._running else self._no_room()
        ends = self._headless.lasts(away) or self._shortage.lasts(missing)
        if ends or ((away or missing) and self._stopping):
            yield from map(_without_machine, [*self._running.values(), *self._held.values()])
            if not self._stopping:
                raise WorkerError(
                    f"launcher=ray: {away or missing}; started again when that has changed, the "
                    "sweep goes on"
                )
            self._running.clear()
            self._held.clear()

    def _no_room(self) -> str | None:
        """That no living machine can hold a job; None: one can, though others may hold it."""
        cpus, gpus = self._config.cpus_per_job, self._config.gpus_per_job
        if room(self._ray, cpus, gpus):
            return None
        with_gpus = f" launcher.gpus_per_job={gpus:g}" * (gpus > 0)
        return f"no machine of the Ray cluster has launcher.cpus_per_job={cpus:g}{with_gpus}"


def _without_machine(job: Job) -> Outcome:
    begun = RunFolder(job.folder).exists
    return Outcome(job.name, "interrupted" if begun else "waiting", "no machine is left for it")


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" * (len(names) > most)
    return ", ".join(names[:most]) + more
