"""What a command line would run: klrl plan -m ...

    klrl plan -m sweep=NAME kl=legacy,retrieve seed=0,1,2 launcher=joblib

Takes the arguments of klrl, checks every job, and prints which would run, which have finished, and
how many run at a time. Nothing is written.
"""

from __future__ import annotations


def plan_command(argv: list[str]) -> int:
    """Print the jobs; return the exit code."""
    from klrl.config.compose import parse_args

    args = parse_args(argv)
    if args.help:
        print(__doc__)
        return 0
    from klrl.sweep.plan import print_plan

    print_plan(args)
    return 0
