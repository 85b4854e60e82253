"""Declares the settings of a sweep, launcher and search, which no job reads."""

from __future__ import annotations

from typing import Literal

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, Count, Natural, NonNegative, Positive, Values, setting


@registered("launcher", "local", sweep="sweep.launchers:local")
class LauncherConfig(ChoiceConfig):
    """One job after the other, in this process."""

    def at_once(self, devices: int) -> int | None:
        """Return the number of jobs at a time on ``devices`` CUDA devices; None: as many as fit."""
        return 1


@registered("launcher", "joblib", sweep="sweep.launchers:joblib", package="joblib")
class JoblibConfig(LauncherConfig):
    """Several jobs at a time on this machine."""

    #: jobs at a time, each in a process; null: jobs_per_device on each CUDA device, else 2
    n_jobs: Count | None = None
    #: jobs that share a CUDA device, if n_jobs is null; small networks leave room for several
    jobs_per_device: Count = 1

    def at_once(self, devices: int) -> int:
        """Return ``n_jobs``, else ``jobs_per_device`` on each device, else 2 without devices."""
        return self.n_jobs or devices * self.jobs_per_device or 2


@registered("launcher", "submitit", sweep="sweep.queue:submitit", package="submitit")
class SubmititConfig(LauncherConfig):
    """Each job as a SLURM job."""

    #: slurm, local (processes on this machine, for a trial) or auto (slurm if it is installed)
    cluster: Literal["slurm", "local", "auto"] = "slurm"
    #: limit in minutes; shortly before it a job writes a checkpoint, and is queued again
    timeout_min: Count = 240
    cpus_per_task: Count = 1  # CPUs of each job
    gpus_per_node: Natural = 0  # GPUs of each job
    mem_gb: Positive = 4  # memory of each job; a control job needs about 0.6
    array_parallelism: Count = 64  # most jobs of the sweep that SLURM runs at a time
    partition: str | None = None  # the queue; null = SLURM's default
    slurm: Values = setting({})  # further options of sbatch, such as '{account: lab}'

    def at_once(self, devices: int) -> int | None:
        """Return ``array_parallelism``; None for the local cluster, which starts all jobs."""
        return None if self.cluster == "local" else self.array_parallelism


@registered("launcher", "ray", sweep="sweep.cluster:ray", package="ray")
class RayLauncherConfig(LauncherConfig):
    """Each job as a task on a Ray cluster, or on a local Ray."""

    #: a cluster's HOST:PORT, as in HOST:6379; null: RAY_ADDRESS, else a local Ray on loopback
    address: str | None = None
    cpus: Count | None = None  # without an address: cores to use; null = all
    cpus_per_job: Positive = 1  # cores that Ray reserves for each job
    #: jobs that share a GPU of the cluster, if it has GPUs; with device=cpu a job uses none
    jobs_per_device: Count = 1
    #: seconds to wait for a machine that fits a job; then the sweep ends, and can be resumed
    cpus_timeout: NonNegative = 60

    def at_once(self, devices: int) -> None:
        """Return None, since Ray schedules by ``cpus_per_job`` and ``jobs_per_device``."""


@registered("search", "grid", sweep="sweep.run:run_grid")
class SearchConfig(ChoiceConfig):
    """Every combination of the values given."""


@registered("search", "optuna", sweep="sweep.search:run_search", package="optuna")
class OptunaConfig(SearchConfig):
    """Values chosen by the results so far (Optuna's TPE); seeds are averaged inside a trial."""

    trials: Count = 20  # trials in all, including those of an earlier start
    at_once: Count = 1  # trials that are chosen together, to run in parallel
    metric: str = "eval/return"  # a trial's score is its last value, averaged over seeds
    direction: Literal["maximize", "minimize"] = "maximize"  # which values of the metric are better
    seed: Natural = 0  # seed of TPE's sampler
