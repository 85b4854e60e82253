"""``klrl run``: compose, check everything, then run. torch comes in only after the checks."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, first_line
from klrl.base.imports import collection_paused, import_for_good
from klrl.cli.show import show_job
from klrl.config import JobConfig, conf_dir, register_schemas
from klrl.config.compose import job_config, parse_args
from klrl.config.explain import help_text
from klrl.config.overrides import is_own, key_of, value_of
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_machine
from klrl.sweep.check import check_jobs
from klrl.sweep.single import run_in_folder


def run_command(argv: list[str]) -> int:
    """Train, sweep, go on with a run, or print settings; returns the exit code.

    Raises:
        ConfigError: a word, a setting or a job is refused; nothing was written.
        NonFiniteError, RewardError, WorkerError: a run failed.
        Interrupted: a signal came.
    """
    args = parse_args(argv)
    register_schemas()
    if args.help:
        print(help_text(args.config_dir))
        return 0
    if args.cfg or args.info or args.hydra_help or args.shell_completion:
        return _show(argv, args)
    overrides = args.overrides
    resumed = _given("resume", overrides)
    if resumed is not None:
        return _resume(resumed, overrides, args)
    if args.multirun:
        from klrl.sweep.run import run_sweep

        return run_sweep(overrides, args)
    return _single(overrides, args)


def _show(argv: list[str], args: argparse.Namespace) -> int:
    """The settings with their comments, or what Hydra prints itself; nothing runs."""
    words = [word for word in args.overrides if not key_of(word).startswith("hydra")]
    if args.cfg and args.multirun:
        raise ConfigError(f"--cfg {args.cfg}: prints one job; drop -m")
    if args.cfg == "job":
        print(show_job(words, args), end="")
        return 0
    if args.cfg:
        job_config(words, args.config_dir, args.config_name)
    flags = [word for word in argv if word not in args.given]
    _hydra_main([*flags, *args.overrides], lambda cfg: None)
    return 0


def _given(key: str, overrides: Sequence[str]) -> str | None:
    """The value of a word that klrl reads itself; None where there is none."""
    given = [value_of(word) for word in overrides if key_of(word) == key]
    return given[-1] if given and given[-1] not in ("", "null") else None


def _hydra_main(argv: list[str], task: Callable[[DictConfig], None]) -> None:
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir().resolve()), config_name="config")(
            task
        )()
    finally:
        sys.argv = before


# ----------------------------------------------------------------------------------------- jobs


def _single(overrides: list[str], args: argparse.Namespace) -> int:
    """One job, started as the jobs of a sweep are, in this process."""
    words = _job_words(overrides)
    with collection_paused():
        (checked,) = check_jobs([words], args)
    given = _run_dir(overrides, checked.config)
    import_for_good("klrl.train.loop", domain_of(checked.config).module)
    run_in_folder(given, checked.config, words, argv=sys.orig_argv)
    return 0


def _run_dir(overrides: Sequence[str], config: JobConfig) -> str | None:
    """``hydra.run.dir``, with settings of the job and the time in it, as ``${env.id}_${now:%H%M}``.

    Raises:
        ConfigError: it names a setting that the job has not.
    """
    given = _given("hydra.run.dir", overrides)
    if given is None or "${" not in given:
        return given
    try:
        return str(OmegaConf.create({**dataclasses.asdict(config), "_dir": given})["_dir"])
    except OmegaConfBaseException as error:
        raise ConfigError(f"hydra.run.dir={given}: {first_line(error)}") from error


def _job_words(overrides: Sequence[str]) -> list[str]:
    """What a single job reads; of Hydra's own settings that is where its folder shall be.

    Raises:
        ConfigError: a word that only a sweep, or only Hydra's own runner, reads.
    """
    words = []
    for word in overrides:
        key = key_of(word)
        if is_own(word):
            raise ConfigError(f"{word}: only a sweep reads it; add -m, or drop it")
        if key == "hydra.sweep.dir":
            raise ConfigError(f"{key}: a single run never reads it; give hydra.run.dir")
        if key.startswith("hydra") and key != "hydra.run.dir":
            raise ConfigError(f"{word}: a run never reads it; drop it")
        if key != "hydra.run.dir":
            words.append(word)
    return words


def _resume(path: str, overrides: list[str], args: argparse.Namespace) -> int:
    """Go on with a run, in its own folder and with its own settings."""
    if args.multirun:
        raise ConfigError(f"resume={path}: resumes one run; drop -m")
    from klrl.runs.resume import resumed_config

    words = [word for word in overrides if key_of(word) != "resume"]
    folder, config = resumed_config(path, words)
    check_machine(config, resumed=True)
    import_for_good("klrl.train.loop", domain_of(config).module)
    from klrl.train.loop import start

    start(config, RunFolder(folder), resume=True)
    return 0
