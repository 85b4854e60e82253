"""klrl plan -m ...: prints the jobs that a command line would run.

    klrl plan -m sweep=NAME kl=legacy,retrieve seed=0,1,2 launcher=joblib

Takes the arguments of klrl and checks every job. Prints the jobs that would run, the finished jobs,
the number of jobs that run at a time, and the difference between two settings that a t-test finds
with as many seeds. Writes nothing.
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

    configs = print_plan(args)
    if not configs:
        return 0
    from klrl.report.runs import fewest_seeds
    from klrl.report.statistics import POWER, least_seen

    seeds = fewest_seeds(configs)
    if seeds == 1:
        print("one seed per setting: a report cannot tell a difference from chance")
    elif seeds:
        found = f"a difference of {least_seen(seeds):.1f} standard deviations between seeds"
        print(f"{seeds} seeds per setting: a t-test finds {found} with power {POWER:g}")
    return 0
