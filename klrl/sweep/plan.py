"""``klrl plan``: checks the jobs of a command line, and prints their states; writes nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.text import text_table
from klrl.config import LauncherConfig, OptunaConfig
from klrl.config.overrides import expand, separate, swept_keys
from klrl.runs.folder import RunFolder, planned_frames
from klrl.runs.machine import cuda_devices
from klrl.sweep.jobs import by_status, counted, make_jobs
from klrl.sweep.run import check_jobs, named, sweep_settings


def print_plan(args: argparse.Namespace) -> None:
    """Check all jobs; print each job's state, and how many jobs would run at a time.

    Raises:
        ConfigError: a job is refused.
    """
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
