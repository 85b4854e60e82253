"""What a command line would run, and for how long: ``klrl plan -m ...``. Nothing is written."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from klrl.base.errors import ConfigError
from klrl.base.text import text_table
from klrl.config import LauncherConfig, OptunaConfig, register_schemas
from klrl.config.overrides import expand, split_words
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.progress import duration
from klrl.sweep.check import check_jobs, sweep_settings
from klrl.sweep.estimate import (
    Planned,
    job_seconds,
    kind_of,
    memory,
    slots,
    sweep_seconds,
)
from klrl.sweep.jobs import Standing, make_jobs, stand
from klrl.sweep.probe import Cost
from klrl.sweep.run import check_launcher, named

#: Seconds of iterations that each kind of job is measured for.
SECONDS = 5.0
#: A start above this was a compilation, which is kept and not paid again.
_COMPILED = 12.0


@dataclass(frozen=True)
class Plan:
    """What there is to run.

    Attributes:
        jobs: not finished yet.
        finished: how many are.
        launcher: where they will run.
    """

    jobs: list[Planned]
    finished: int
    launcher: LauncherConfig


def print_plan(args: argparse.Namespace) -> None:
    """Check, measure, compute, print.

    Args:
        args: of :func:`klrl.config.compose.parse_args`.

    Raises:
        ConfigError: a job is refused, or the machine is too small for the jobs at a time.
    """
    register_schemas()
    plan = make_plan(args)
    total = len(plan.jobs) + plan.finished
    done = f", {plan.finished} finished before" if plan.finished else ""
    print(f"{total} job{'s' * (total != 1)}{done}, {len(plan.jobs)} to run", flush=True)
    if not plan.jobs:
        return
    at_once = slots(plan.launcher, len(plan.jobs), os.cpu_count() or 1)
    together = at_once if plan.launcher.on_this_machine else 1
    costs = measured(plan.jobs, min(together, os.cpu_count() or 1))
    print(table(plan.jobs, costs))
    needed = memory(costs, at_once)
    seconds = sweep_seconds(plan.jobs, costs, plan.launcher, at_once)
    print(
        f"expected: {duration(seconds)} with launcher={plan.launcher.name}, {at_once} at a time, "
        f"{needed / 1e9:.1f} GB"
    )
    check_memory(needed, at_once, plan.launcher)


def make_plan(args: argparse.Namespace) -> Plan:
    """The jobs that a command line would run."""
    from klrl.sweep.search import space_of

    words = split_words(args.overrides)
    launcher, search = sweep_settings(words.own, args)
    if not args.multirun and (words.own or words.name):
        raise ConfigError(f"{(words.own or ['sweep'])[0]}: only a sweep reads it; add -m")
    if isinstance(search, OptunaConfig):
        space = space_of(words.job)
        trial = space.jobs([dimension.middle for dimension in space.dimensions])
        checked = check_jobs(trial, args) * search.trials
        check_launcher(launcher, checked)
        jobs = [Planned("trial", tuple(words), config) for words, config in checked]
        return Plan(jobs, 0, launcher)
    checked = check_jobs(expand(words.job) if args.multirun else [words.job], args)
    check_launcher(launcher, checked)
    folder = Path("outputs") / words.name if words.name else Path(words.folder or "outputs/.new")
    made = make_jobs(folder, named(words, checked))
    standing = stand(made)
    return Plan(_planned(standing), len(standing.finished), launcher)


def _planned(standing: Standing) -> list[Planned]:
    jobs = []
    for job in standing.open:
        run = RunFolder(job.folder)
        axis = domain_of(job.config).axis
        done = int(run.manifest.get(axis, 0)) if run.exists else 0
        jobs.append(Planned(job.name, job.words, job.config, done))
    return jobs


def measured(jobs: Sequence[Planned], at_once: int) -> dict[str, Cost]:
    """The cost of each kind of job, with as many side by side as will run side by side."""
    costs = {}
    longest = {}
    for job in sorted(jobs, key=lambda job: job.config.frames):
        longest[kind_of(job.config)] = job
    for kind, job in longest.items():
        print(f"  measuring {job.name} for {SECONDS:g} s ...", file=sys.stderr, flush=True)
        cost = _probe(job, 1)
        if cost.start > _COMPILED or at_once > 1:
            cost = _probe(job, at_once)
        costs[kind] = cost
    return costs


def _probe(job: Planned, copies: int) -> Cost:
    """Measure a job in so many processes at a time; the mean of what they found.

    Raises:
        ConfigError: it fails.
    """
    asked = {"settings": asdict(job.config), "seconds": SECONDS}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "klrl.sweep.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(copies)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        process.stdin = None
    found = []
    for process in processes:
        out, err = process.communicate()
        if process.returncode:
            last = (err.strip().splitlines() or ["no word"])[-1]
            raise ConfigError(f"{job.name}: fails when it is tried: {last}; run it by itself")
        found.append(Cost(**json.loads(out.strip().splitlines()[-1])))
    numbers = ("start", "job", "iteration", "evaluation", "checkpoint")
    return replace(found[0], **{name: mean(getattr(c, name) for c in found) for name in numbers})


def table(jobs: Sequence[Planned], costs: Mapping[str, Cost]) -> str:
    """A line per kind of job."""
    lines = [("kind of job, as in", "jobs", "frames", "frames/s", "each", "memory")]
    for kind, cost in costs.items():
        mine = [job for job in jobs if kind_of(job.config) == kind]
        each = mean(job_seconds(job, cost) for job in mine)
        speed = mine[0].config.frames_per_iteration / cost.iteration
        frames = mean(job.config.iterations * job.config.frames_per_iteration for job in mine)
        size = f"{(cost.memory + cost.children) / 1e9:.1f} GB"
        lines.append(
            (mine[0].name, str(len(mine)), f"{frames:,.0f}", f"{speed:,.0f}", duration(each), size)
        )
    return text_table(lines, right=range(1, 6), indent=2)


def check_memory(needed: int, at_once: int, launcher: LauncherConfig) -> None:
    """Refuse more jobs at a time than this machine has memory for."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if launcher.on_this_machine and needed > has:
        raise ConfigError(
            f"launcher={launcher.name}: {at_once} jobs at a time need {needed / 1e9:.0f} GB, this "
            f"machine has {has / 1e9:.0f}; run fewer at a time"
        )
