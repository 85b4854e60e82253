"""``klrl plan -m ...``: what a command line would run, and for how long."""

from __future__ import annotations

from functools import partial

from klrl.cli.wrapper import execute

HELP = """\
What a command line would run, and for how long: klrl plan -m ...

    klrl plan -m sweep=NAME kl=legacy,retrieve seed=0,1,2 launcher=joblib

Takes the arguments of klrl, checks every job, measures one of each kind for some seconds and
prints jobs, frames, speed, time and memory. Nothing is written.
"""


def plan_command(argv: list[str]) -> int:
    """Print the cost of jobs; returns the exit code."""
    from klrl.config.compose import parse_args

    args = parse_args(argv)
    if args.help:
        print(HELP)
        return 0
    from klrl.sweep.plan import print_plan

    print_plan(args)
    return 0


#: ``python -m klrl.plan``, which is ``klrl plan``.
main = partial(execute, "plan")

if __name__ == "__main__":
    main()
