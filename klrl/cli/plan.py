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


def plan_command(argv: list[str]) -> int:
    """Print the jobs of a command line, or a job's memory; return the exit code."""
    from klrl.base.errors import ConfigError
    from klrl.cli.wrapper import Parser
    from klrl.config.overrides import parse_args

    flags = Parser(prog="klrl plan", add_help=False, allow_abbrev=False)
    flags.add_flag("--memory", "")
    flags.add_argument("--ranks", type=int)
    asked, argv = flags.parse_known_args(argv)
    args = parse_args(argv)
    if args.help:
        print(__doc__)
        return 0
    if asked.memory:
        _print_memory(args, 1 if asked.ranks is None else asked.ranks)
        return 0
    if asked.ranks is not None:
        raise ConfigError(
            f"--ranks={asked.ranks}: only --memory reads it; add --memory, or drop it"
        )
    from klrl.sweep.plan import print_plan

    print_plan(args)
    return 0


def _print_memory(args: argparse.Namespace, ranks: int) -> None:
    from klrl.base.errors import ConfigError
    from klrl.base.text import text_table
    from klrl.config import LanguageConfig
    from klrl.sweep.run import check_jobs

    config = None if args.multirun else check_jobs([args.overrides], args)[0].config
    if not isinstance(config, LanguageConfig):
        raise ConfigError("--memory: estimates one language job; drop -m, or --memory")
    from klrl.language.run.memory import PHASES, memory

    parts = memory(config, ranks)
    parts["all"] = tuple(map(sum, zip(*parts.values(), strict=True)))
    rows = [(name, *(f"{size / 1e9:.3g}" for size in sizes)) for name, sizes in parts.items()]
    print(text_table([("GB", *PHASES), *rows], right=(1, 2, 3)))
