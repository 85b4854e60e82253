"""klrl plan -m ...: prints the jobs that a command line would run.

    klrl plan -m sweep=NAME kl=legacy,retrieve seed=0,1,2 launcher=joblib

Takes the arguments of klrl and checks every job. Prints the jobs that would run, the finished jobs,
and the number of jobs that run at a time. Writes nothing.

    klrl plan --memory [--ranks=N] experiment=sort_digits ...

Prints an estimate of the memory of a language job on each of N devices. It reads config.json and
the tokenizer of actor.model, but no weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.text import text_table
from klrl.cli.wrapper import DONE, Parser
from klrl.config import LanguageConfig, LauncherConfig, OptunaConfig
from klrl.config.overrides import expand, parse_args, separate, swept_keys
from klrl.runs.folder import RunFolder, planned_frames
from klrl.runs.machine import cuda_devices
from klrl.sweep.jobs import by_status, counted, make_jobs
from klrl.sweep.run import check_jobs, named, sweep_settings


def plan_command(argv: list[str]) -> int:
    """Print the jobs of a command line, or a job's memory; return the exit code."""
    flags = Parser(prog="klrl plan", add_help=False, allow_abbrev=False)
    flags.add_flag("--memory", "")
    flags.add_argument("--ranks", type=int)
    asked, argv = flags.parse_known_args(argv)
    args = parse_args(argv)
    if args.help:
        print(__doc__)
    elif asked.memory:
        _print_memory(args, 1 if asked.ranks is None else asked.ranks)
    elif asked.ranks is not None:
        raise ConfigError(
            f"--ranks={asked.ranks}: only --memory reads it; add --memory, or drop it"
        )
    else:
        _print_plan(args)
    return DONE


def _print_memory(args: argparse.Namespace, ranks: int) -> None:
    config = None if args.multirun else check_jobs([args.overrides], args)[0].config
    if not isinstance(config, LanguageConfig):
        raise ConfigError("--memory: estimates one language job; drop -m, or --memory")
    from klrl.language.run.memory import PHASES, memory

    parts = memory(config, ranks)
    parts["all"] = tuple(map(sum, zip(*parts.values(), strict=True)))
    rows = [(name, *(f"{size / 1e9:.3g}" for size in sizes)) for name, sizes in parts.items()]
    print(text_table([("GB", *PHASES), *rows], right=(1, 2, 3)))


def _print_plan(args: argparse.Namespace) -> None:
    """Check all jobs; print each job's state, and how many jobs would run at a time."""
    sweep = separate(args.overrides, multirun=True)
    launcher, search = sweep_settings(sweep.own, args)
    if not args.multirun and (own := [each for each in args.overrides if each.of_sweep]):
        raise ConfigError(f"{own[0]}: only a sweep reads it; add -m")
    if isinstance(search, OptunaConfig):
        from klrl.sweep.search import checked_space  # imports optuna

        space = checked_space(sweep.job, search, args)
        print(f"{search.trials} trials, with {len(space.seeds)} seeds each; {_at_once(launcher)}")
        return
    checked = check_jobs(expand(sweep.job) if args.multirun else [sweep.job], args)
    folder = Path("outputs") / sweep.name if sweep.name else Path(sweep.folder or "outputs/.new")
    status = by_status(make_jobs(folder, named(swept_keys(sweep.job), checked)))
    rows = []
    for state, jobs in status.items():
        for job in jobs:
            run = RunFolder(job.folder)
            rows.append((job.name, state, planned_frames(run.manifest) if run.exists else ""))
    print(text_table(rows, indent=2))
    print(f"{counted(status)}; {_at_once(launcher)}")


def _at_once(launcher: LauncherConfig) -> str:
    number = launcher.at_once(cuda_devices())
    some = "all" if launcher.name == "submitit" else "as many as fit"
    return f"launcher={launcher.name}, {number or some} at a time"
