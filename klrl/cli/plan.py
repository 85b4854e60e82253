"""klrl plan -m ...: prints the jobs that a command line would run.

    klrl plan -m sweep=NAME kl=legacy,retrieve seed=0,1,2 launcher=joblib

Takes the arguments of klrl and checks every job. Prints the jobs that would run, the finished jobs,
and the number of jobs that run at a time. Writes nothing.
"""

from __future__ import annotations


def plan_command(argv: list[str]) -> int:
    """Print the jobs of a command line; return the exit code."""
    from klrl.config.overrides import parse_args

    args = parse_args(argv)
    if args.help:
        print(__doc__)
        return 0
    from klrl.sweep.plan import print_plan

    print_plan(args)
    return 0
