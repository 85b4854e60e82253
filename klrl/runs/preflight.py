"""Checks that need the machine: packages, devices, environments, run folders.

Run before anything is written. torch is imported only where a CUDA device is asked for.
"""

from __future__ import annotations

from klrl.config import Config, JobConfig, LanguageConfig, WandbConfig
from klrl.control.preflight import check_env
from klrl.control.ray_machine import check_ray_machine
from klrl.domains import domain_of
from klrl.runs.find import check_not_running, check_other_runs, find_run, other_runs
from klrl.runs.machine import check_device, check_language_packages, check_wandb, wandb_mode

__all__ = [
    "check_device",
    "check_env",
    "check_machine",
    "check_not_running",
    "find_run",
    "other_runs",
    "wandb_mode",
]


def check_machine(
    config: JobConfig, overridden: frozenset[str] = frozenset(), *, resumed: bool = False
) -> None:
    """Refuse a job that this machine cannot run.

    A resumed run holds its reference and its weights in its own checkpoint and needs no other
    folder.

    Args:
        config: the checked job.
        overridden: the keys that the user gave.
        resumed: whether the run goes on from its own checkpoint.

    Raises:
        ConfigError: an optional package, a device, a run folder or an environment is missing, or
            another run's policy does not fit.
    """
    if isinstance(config.logger, WandbConfig):
        check_wandb(config.logger)
    domain_of(config).preflight(config, overridden, resumed=resumed)
    check_device(config.device)


def check_control(config: Config, overridden: frozenset[str], *, resumed: bool) -> None:
    """The part of a control job; arguments as :func:`check_machine`."""
    if config.collector.elsewhere:
        check_ray_machine()
    check_env(config.env, config.actor, overridden)
    if not resumed:
        check_other_runs(config)


def check_language(config: LanguageConfig, overridden: frozenset[str], *, resumed: bool) -> None:
    """The part of a language job; arguments as :func:`check_machine`."""
    check_language_packages(config)
    from klrl.language.preflight import check_language_machine  # needs those packages

    check_language_machine(config, resumed=resumed)
