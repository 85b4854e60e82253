"""Check every job of a command line before the first one runs: its settings, then this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from klrl.base.errors import ConfigError
from klrl.config import GROUPS, SWEEP_GROUPS, LauncherConfig, SearchConfig, factory
from klrl.config.checks import check_names_unset, to_settings
from klrl.config.compose import Checked, Composer, keys
from klrl.runs.machine import check_machine, check_package


def check_jobs(jobs: Sequence[list[str]], args: argparse.Namespace) -> list[Checked]:
    """Check every job before the first one runs; the machine once per kind of job.

    Raises:
        ConfigError: a job cannot run; the first one is named.
    """
    composer = Composer(args.config_dir, args.config_name)
    checked = [Checked(job, composer.job_config(job)) for job in jobs]
    seen = set()
    for each in checked:
        parts = ("env", "actor", "collector", "device", "reference", "logger")
        machine = repr([getattr(each.config, part) for part in parts])
        if machine not in seen:
            check_machine(each.config, keys(each.overrides))
        seen.add(machine)
    for group in GROUPS:
        of = {getattr(each.config, group).name: each.config for each in checked}
        for config in of.values() if len(of) > 1 else ():  # of one choice the first job says it
            factory(group, getattr(config, group), config.domain)
    return checked


def sweep_settings(
    own: Sequence[str], args: argparse.Namespace
) -> tuple[LauncherConfig, SearchConfig]:
    """The launcher and the search that overrides of their groups choose.

    Raises:
        ConfigError: an override is refused, or a package is missing.
    """
    for override in own:
        group = override.partition("=")[0]
        if group in SWEEP_GROUPS and "," in override:
            raise ConfigError(f"{override}: a sweep has one {group}; give one")
    cfg = Composer(args.config_dir, "sweep").explained(own)
    check_names_unset(keys(own))
    parts: dict[str, Any] = to_settings(cfg, SWEEP_GROUPS)
    for group, config in parts.items():
        check_package(group, config.name)
    return parts["launcher"], parts["search"]
