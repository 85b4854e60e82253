"""The command line: compose, check everything, then run. torch comes in only after the checks."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from klrl.checks import check_all_read, to_config
from klrl.config import Config, LanguageConfig, conf_dir, register_schemas
from klrl.errors import ConfigError, Interrupted, NonFiniteError, RewardError, WorkerError
from klrl.hints import explain, help_text
from klrl.preflight import check_machine
from klrl.run_folder import new_folder

USAGE_ERROR = 2


class _Refused(BaseException):
    """A ConfigError on its way through Hydra, which would print an Exception and exit with 1."""


class _Failed(BaseException):
    """A failed run's line on its way through Hydra, which would print a traceback around it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m klrl``; exits with 0, 1, 2, 130 or 143 as docs/architecture.md says."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(_main(list(sys.argv[1:] if argv is None else argv)))
    except ConfigError as error:
        if _full_errors():
            traceback.print_exc()
        refuse(str(error))
    except (NonFiniteError, RewardError, WorkerError, _Failed) as error:
        print(f"klrl: failed: {error}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        print("\nklrl: stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM before the run has begun: leave as Ctrl-C does."""
    raise Interrupted(signum)


def _full_errors() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


def refuse(message: str) -> NoReturn:
    """Say in a line or two what is wrong and exit with 2."""
    print(f"klrl: {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _main(argv: list[str]) -> int:
    args = _parse(argv)
    register_schemas()
    if args.help:
        print(help_text(args.config_dir))
        return 0
    overrides = _allow_env_kwargs(args.overrides)
    flags = [word for word in argv if word not in args.overrides]
    if args.cfg or args.info or args.hydra_help or args.shell_completion:
        if args.cfg:
            _check_job(overrides, args)
        _hydra_main([*flags, *overrides], _print_only)
        return 0
    resumed = _value_of("resume", overrides)
    if resumed is not None:
        return _resume(resumed, overrides, args)
    _check_all(overrides, args)
    return _launch(flags, overrides, args)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = get_args_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; settings are KEY=VALUE, see --help")
    if args.config_path:
        raise ConfigError("--config-path: klrl's own settings are always read; use --config-dir")
    bare = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    if bare:
        raise ConfigError(f"{bare[0]}: not a setting; write KEY=VALUE or GROUP=CHOICE, see --help")
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: no such folder; give an existing one")
    return args


def _allow_env_kwargs(overrides: list[str]) -> list[str]:
    """Let ``env.kwargs.g=9.81`` add a key: Hydra wants ``++`` where a dictionary is open."""
    open_keys = ("env.kwargs.", "env.kwargs=")
    return [f"++{word}" if word.startswith(open_keys) else word for word in overrides]


def _value_of(key: str, overrides: list[str]) -> str | None:
    words = [word.lstrip("+") for word in overrides]
    given = [word.split("=", 1)[1] for word in words if word.startswith(f"{key}=")]
    return given[-1] if given and given[-1] not in ("", "null") else None


# ---------------------------------------------------------------------------------------- checks


def _check_all(overrides: list[str], args: argparse.Namespace) -> list[Config | LanguageConfig]:
    """Check every job of the command line before the first one runs."""
    jobs = _expand(overrides) if args.multirun else [overrides]
    checked = [_check_job(job, args) for job in jobs]
    seen = set()
    for job, config in zip(jobs, checked, strict=True):
        parts = ("env", "actor", "collector", "device", "reference", "logger")
        machine = repr([getattr(config, part) for part in parts])
        if machine not in seen:
            check_machine(config, _keys(job))
        seen.add(machine)
    return checked


def _expand(overrides: list[str]) -> list[list[str]]:
    """The jobs of a sweep, as Hydra's own sweeper will make them."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    except HydraException as error:
        raise explain(error, overrides, None) from error


def _keys(overrides: Sequence[str]) -> frozenset[str]:
    return frozenset(word.lstrip("+~").split("=")[0] for word in overrides)


def _check_job(overrides: list[str], args: argparse.Namespace) -> Config | LanguageConfig:
    words = [word for word in overrides if not word.startswith("hydra.sweep")]
    try:
        config = to_config(compose(words, args.config_dir, args.config_name))
    except ConfigError:
        raise
    # Hydra lets a ValueError through for kl=null, and YAML's own errors for a broken file.
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise explain(error, words, args.config_dir) from error
    check_all_read(config, _keys(words))
    return config


def compose(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> DictConfig:
    """Compose one job's config, without running anything.

    Args:
        overrides: words as on the command line.
        config_dir: a folder with the user's own choices.
        config_name: another primary config; default ``config``.
    """
    register_schemas()
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return hydra.compose(config_name or "config", overrides=[*overrides, *extra])


# ----------------------------------------------------------------------------------------- jobs


def _launch(flags: list[str], overrides: list[str], args: argparse.Namespace) -> int:
    """Give the run (or the sweep) a folder of its own and hand over to Hydra."""
    key, other = "hydra.run.dir", "hydra.sweep.dir"
    if args.multirun:
        key, other = other, key
    if _value_of(other, overrides) is not None:
        kind = "a sweep" if args.multirun else "a single run"
        raise ConfigError(f"{other}: {kind} never reads it; give {key}")
    given = _value_of(key, overrides)
    folder = Path(given) if given is not None else None
    if folder is not None and any(folder.glob("**/manifest.json")):
        hint = "give another" if args.multirun else f"give another, or resume={folder}"
        raise ConfigError(f"{key}={folder}: holds a run already; {hint}")
    before = set(folder.iterdir()) if folder is not None and folder.is_dir() else None
    try:
        if folder is None:
            folder = new_folder("_sweep" if args.multirun else "")
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
    """Leave nothing of jobs that were refused or stopped before the first of them began.

    Args:
        folder: the run's or the sweep's.
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
    from hydra.types import RunMode

    from klrl.experiment import run

    about = HydraConfig.get()
    swept = about.mode == RunMode.MULTIRUN
    group = Path(about.sweep.dir).name if swept else None
    try:
        run(to_config(cfg), Path(about.runtime.output_dir), group=group)
    except ConfigError as error:
        raise _Refused(str(error)) from error
    except (NonFiniteError, RewardError, WorkerError) as error:
        if swept or _full_errors():  # the sweep's other jobs shall still run
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


if __name__ == "__main__":
    main()
