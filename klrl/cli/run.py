"""``klrl run``: composes and checks a job, then runs it; imports torch only after the checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from klrl.base.errors import ConfigError
from klrl.base.imports import collection_paused, import_for_good
from klrl.base.streams import lasting
from klrl.config import register_schemas
from klrl.config.compose import job_config, keys, parse_args
from klrl.config.overrides import is_of_sweep, key_of, value_of
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_machine
from klrl.runs.start import run_in_folder


def run_command(argv: list[str]) -> int:
    """Train, run a sweep, resume a run, or print help or settings; return the exit code."""
    args = parse_args(argv)
    register_schemas()
    if args.help:
        from klrl.config.explain import help_text

        print(help_text(args.config_dir))
        return 0
    if args.cfg:
        from klrl.cli.show import show_job

        if args.multirun:
            raise ConfigError("--cfg job: prints one job; drop -m")
        print(
            show_job([each for each in args.overrides if not _is_hydras(each)], args.config_dir),
            end="",
        )
        return 0
    with lasting("stdout"):
        return _train(args.overrides, args)


def _train(overrides: list[str], args: argparse.Namespace) -> int:
    """Resume a run, or run a sweep or a single job."""
    if any(key_of(each) == "resume" and not value_of(each) for each in overrides):
        raise ConfigError("resume=: names no run; give a run folder, as resume=outputs/NAME")
    if args.multirun:
        from klrl.sweep.run import run_sweep

        return run_sweep(args)
    resumed = _given("resume", overrides)
    if resumed is not None:
        return _resume(resumed, overrides)
    return _single(overrides, args)


def _is_hydras(override: str) -> bool:
    return key_of(override).startswith("hydra")


def _given(key: str, overrides: Sequence[str]) -> str | None:
    """Return the value of the last override of ``key``; None if it is empty, null or missing."""
    given = [value_of(each) for each in overrides if key_of(each) == key]
    return given[-1] if given and given[-1] not in ("", "null") else None


def _single(overrides: list[str], args: argparse.Namespace) -> int:
    job = _job_overrides(overrides)
    with collection_paused():
        config = job_config(job, args.config_dir)
        check_machine(config, keys(job))
    given = _given("hydra.run.dir", overrides)
    if given is not None and "${" in given:
        raise ConfigError(f"hydra.run.dir={given}: contains an interpolation; give a plain path")
    import_for_good("klrl.train.loop", domain_of(config).module)
    run_in_folder(given, config, job)
    return 0


def _job_overrides(overrides: Sequence[str]) -> list[str]:
    """Drop ``hydra.run.dir`` from a single job's overrides; refuse settings of sweeps and Hydra."""
    job = []
    for override in overrides:
        key = key_of(override)
        if is_of_sweep(override):
            raise ConfigError(f"{override}: only a sweep reads it; add -m, or drop it")
        if key == "hydra.sweep.dir":
            raise ConfigError(f"{key}: a single run never reads it; give hydra.run.dir")
        if _is_hydras(override) and key != "hydra.run.dir":
            raise ConfigError(f"{override}: a run never reads it; drop it")
        if key != "hydra.run.dir":
            job.append(override)
    return job


def _resume(path: str, overrides: list[str]) -> int:
    """Resume a run in its folder, with its stored settings and the changes in ``overrides``."""
    from klrl.runs.resume import resumed_config

    changes = [each for each in overrides if key_of(each) != "resume"]
    folder, config = resumed_config(path, changes)
    check_machine(config, resumed=True)
    import_for_good("klrl.train.loop", domain_of(config).module)
    from klrl.train.loop import start

    start(config, RunFolder(folder), resume=True)
    return 0
