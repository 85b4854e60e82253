"""``klrl run``: composes and checks a job, then runs it; imports torch only after the checks."""

from __future__ import annotations

import argparse

from klrl.base import ranks
from klrl.base.errors import ConfigError
from klrl.base.imports import collection_paused, import_for_good
from klrl.base.streams import lasting
from klrl.config import register_schemas
from klrl.config.compose import Composer
from klrl.config.given import Given
from klrl.config.overrides import parse_args, separate
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_machine
from klrl.train.start import run_in_folder, train


def run_command(argv: list[str]) -> int:
    """Train, run a sweep, resume a run, or print help or settings; return the exit code."""
    with ranks.joined():  # first, so that rank 0 tells what is refused
        return _command(parse_args(argv))


def _command(args: argparse.Namespace) -> int:
    register_schemas()
    if args.help:
        from klrl.config.explain import help_text

        print(help_text(args.config_dir))
        return 0
    if args.cfg:
        from klrl.cli.show import show_job

        if args.multirun:
            raise ConfigError("--cfg job: prints one job; drop -m")
        given = [each for each in args.overrides if not each.of_hydra]
        print(show_job(given, args.config_dir), end="")
        return 0
    from klrl.runs.progress import Progress

    Progress.verbose = args.verbose
    with lasting("stdout"):
        return _train(args)


def _train(args: argparse.Namespace) -> int:
    """Resume a run, or run a sweep or a single job."""
    resumed = [each.value for each in args.overrides if each.key == "resume"]
    if "" in resumed:
        raise ConfigError("resume=: names no run; give a run folder, such as resume=outputs/NAME")
    if args.multirun:
        if ranks.world() > 1:
            raise ConfigError("-m: torchrun starts one run; start a sweep without torchrun")
        from klrl.sweep.run import run_sweep

        return run_sweep(args)
    if resumed and resumed[-1] != "null":
        return _resume(resumed[-1], [each for each in args.overrides if each.key != "resume"])
    return _single(args)


def _single(args: argparse.Namespace) -> int:
    given = separate(args.overrides, multirun=False)
    with ranks.agreeing(), collection_paused():
        config = Composer(args.config_dir).job_config(given.job)
        check_machine(config, given.job)
    if given.folder is not None and "${" in given.folder:
        told = "contains an interpolation; give a plain path"
        raise ConfigError(f"hydra.run.dir={given.folder}: {told}")
    import_for_good("klrl.train.loop", domain_of(config).module)
    run_in_folder(given.folder, config, given.job)
    return 0


def _resume(path: str, changes: list[Given]) -> int:
    """Resume a run in its folder, with its stored settings and ``changes``."""
    from klrl.runs.resume import resumed_config

    folder, config = ranks.first(lambda: resumed_config(path, changes))
    with ranks.agreeing():
        check_machine(config, resumed=True)
    import_for_good("klrl.train.loop", domain_of(config).module)
    train(config, RunFolder(folder), resume=True)
    return 0
