"""Settings of a sweep: launcher and search. No job reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, choice, number


@dataclass
class LauncherConfig(ChoiceConfig):
    """One job after the other, in this process."""

    @property
    def on_this_machine(self) -> bool:
        """Whether the jobs run on the sweep's own machine."""
        return True

    def at_once(self, jobs: int, cores: int, devices: int) -> int:
        """How many of ``jobs`` run at a time on so many ``cores`` and CUDA ``devices``."""
        return 1


@dataclass
class JoblibConfig(LauncherConfig):
    """Several jobs at a time on this machine."""

    n_jobs: Optional[int] = number(ge=1)  # noqa: UP045
    jobs_per_device: int = number(ge=1)

    def at_once(self, jobs: int, cores: int, devices: int) -> int:
        """``n_jobs``, by default ``jobs_per_device`` on each device, or 2 on the cores."""
        return self.n_jobs or devices * self.jobs_per_device or 2


@dataclass
class SubmititConfig(LauncherConfig):
    """One SLURM job each."""

    cluster: str = choice("slurm", "local", "auto")
    timeout_min: int = number(ge=1)
    cpus_per_task: int = number(ge=1)
    gpus_per_node: int = number(ge=0)
    mem_gb: float = number(gt=0)
    array_parallelism: int = number(ge=1)
    partition: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    slurm: dict[str, Any] = MISSING

    @property
    def on_this_machine(self) -> bool:
        """Only with submitit's local executor."""
        return self.cluster == "local"

    def at_once(self, jobs: int, cores: int, devices: int) -> int:
        """``array_parallelism``; submitit's local executor starts all jobs."""
        return jobs if self.on_this_machine else self.array_parallelism


@dataclass
class RayLauncherConfig(LauncherConfig):
    """One Ray task each."""

    address: Optional[str] = None  # noqa: UP045
    cpus: Optional[int] = number(ge=1)  # noqa: UP045
    cpus_per_job: float = number(gt=0)
    jobs_per_device: int = number(ge=1)
    cpus_timeout: float = number(ge=0)

    @property
    def on_this_machine(self) -> bool:
        """Unless a cluster's address is given."""
        return not self.address

    def at_once(self, jobs: int, cores: int, devices: int) -> int:
        """``cpus`` (default: the cores) / ``cpus_per_job``, and no more than fit on the devices."""
        fit = int((self.cpus or cores) / self.cpus_per_job)
        return min(fit, devices * self.jobs_per_device) if devices else fit


@dataclass
class SearchConfig(ChoiceConfig):
    """Every combination of the values given."""


@dataclass
class OptunaConfig(SearchConfig):
    """Values chosen by the results so far."""

    trials: int = number(ge=1)
    at_once: int = number(ge=1)
    metric: str = MISSING
    direction: str = choice("maximize", "minimize")
    seed: int = number(ge=0)


@dataclass
class SweepRoot:
    """The settings of a sweep besides those of its jobs."""

    launcher: Any = None
    search: Any = None
