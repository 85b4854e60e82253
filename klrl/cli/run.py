"""``klrl run``: compose, check everything, then run. torch comes in only after the checks."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from klrl.checks import to_config
from klrl.cli.show import show_job
from klrl.compose import check_jobs, job_config, parse_args
from klrl.config import conf_dir, register_schemas
from klrl.errors import FAILURES, ConfigError, Interrupted
from klrl.hints import help_text
from klrl.preflight import check_machine
from klrl.run_folder import new_folder
from klrl.sweep.words import is_own


class _Refused(BaseException):
    """A ConfigError on its way through Hydra, which would print an Exception and exit with 1."""


class _Failed(BaseException):
    """A failed run's line on its way through Hydra, which would print a traceback around it."""


def run_command(argv: list[str]) -> int:
    """Train, sweep, go on with a run, or print settings; returns the exit code.

    Raises:
        ConfigError: a word, a setting or a job is refused; nothing was written.
        NonFiniteError, RewardError, WorkerError: a run failed.
        Interrupted: a signal came.
    """
    try:
        return _main(argv)
    except _Failed as failed:
        raise (failed.__cause__ or failed) from None


def _full_errors() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


def _main(argv: list[str]) -> int:
    args = parse_args(argv)
    register_schemas()
    if args.help:
        print(help_text(args.config_dir))
        return 0
    overrides = args.overrides
    flags = [word for word in argv if word not in args.given]
    if args.cfg and args.multirun:
        raise ConfigError(f"--cfg {args.cfg}: prints one job; drop -m")
    if args.cfg == "job":
        print(show_job(_without_hydra(overrides), args), end="")
        return 0
    if args.cfg or args.info or args.hydra_help or args.shell_completion:
        if args.cfg:
            job_config(_without_hydra(overrides), args.config_dir, args.config_name)
        _hydra_main([*flags, *overrides], _print_only)
        return 0
    resumed = _value_of("resume", overrides)
    if resumed is not None:
        return _resume(resumed, overrides, args)
    if args.multirun:
        from klrl.sweep.run import run_sweep

        return run_sweep(overrides, args)
    _refuse_sweep_words(overrides)
    check_jobs([_without_hydra(overrides)], args)
    return _launch(flags, overrides)


def _value_of(key: str, overrides: list[str]) -> str | None:
    words = [word.lstrip("+") for word in overrides]
    given = [word.split("=", 1)[1] for word in words if word.startswith(f"{key}=")]
    return given[-1] if given and given[-1] not in ("", "null") else None


def _refuse_sweep_words(overrides: Sequence[str]) -> None:
    """A single job reads nothing of a sweep's."""
    for word in filter(is_own, overrides):
        raise ConfigError(f"{word}: only a sweep reads it; add -m, or drop it")


# ----------------------------------------------------------------------------------------- jobs


def _without_hydra(overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if not word.startswith(("hydra.run", "hydra.sweep"))]


def _launch(flags: list[str], overrides: list[str]) -> int:
    """Give the run a folder of its own and hand over to Hydra."""
    key = "hydra.run.dir"
    if _value_of("hydra.sweep.dir", overrides) is not None:
        raise ConfigError(f"hydra.sweep.dir: a single run never reads it; give {key}")
    given = _value_of(key, overrides)
    folder = Path(given) if given is not None else None
    if folder is not None and any(folder.glob("**/manifest.json")):
        raise ConfigError(f"{key}={folder}: holds a run already; give another, or resume={folder}")
    before = set(folder.iterdir()) if folder is not None and folder.is_dir() else None
    try:
        if folder is None:
            folder = new_folder()
            overrides = [*overrides, f"{key}={folder}"]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={given or 'outputs'}: cannot be written: {error}") from error
    try:
        _hydra_main([*flags, *overrides], _job)
    except _Refused as refused:
        _remove_unstarted(folder, before)
        raise ConfigError(str(refused)) from refused.__cause__
    except (ConfigError, KeyboardInterrupt, Interrupted):
        _remove_unstarted(folder, before)
        raise
    return 0


def _remove_unstarted(folder: Path, before: set[Path] | None) -> None:
    """Leave nothing of a job that was refused or stopped before it began.

    Args:
        folder: the run's.
        before: what was in it already, and stays; None where it was made for this command.
    """
    if any(folder.glob("**/manifest.json")):
        return
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in set(folder.iterdir()) - before:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _hydra_main(argv: list[str], task: Callable[[DictConfig], None]) -> None:
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir().resolve()), config_name="config")(
            task
        )()
    finally:
        sys.argv = before


def _print_only(cfg: DictConfig) -> None:
    """Hydra prints the config itself; nothing runs."""


def _job(cfg: DictConfig) -> None:
    """One job, in the run folder that Hydra made."""
    from hydra.core.hydra_config import HydraConfig

    from klrl.experiment import run

    try:
        run(to_config(cfg), Path(HydraConfig.get().runtime.output_dir))
    except ConfigError as error:
        raise _Refused(str(error)) from error
    except FAILURES as error:
        if _full_errors():
            raise
        raise _Failed(str(error)) from error


def _resume(path: str, overrides: list[str], args: argparse.Namespace) -> int:
    """Go on with a run, in its own folder and with its own settings."""
    if args.multirun:
        raise ConfigError(f"resume={path}: resumes one run; drop -m")
    from klrl.resume import resumed_config

    words = [word for word in overrides if not word.lstrip("+").startswith("resume=")]
    folder, config = resumed_config(path, words)
    check_machine(config, resumed=True)
    from klrl.experiment import run

    run(config, folder, resume=True)
    return 0
