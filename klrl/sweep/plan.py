"""``klrl plan``: predicts which jobs a command line would run, and how long; writes nothing."""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from klrl.base.errors import ConfigError
from klrl.base.text import text_table
from klrl.config import JobConfig, LauncherConfig, OptunaConfig
from klrl.config.overrides import expand, split_overrides
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.machine import cuda_devices
from klrl.runs.progress import duration
from klrl.sweep.jobs import FINISHED, OPEN, by_status, flat_settings, make_jobs
from klrl.sweep.probe import Cost
from klrl.sweep.run import check_jobs, named, sweep_settings
from klrl.train.schedule import fitting, schedule

#: Seconds of iterations for which each kind of job is measured.
SECONDS = 5.0
#: A start that takes longer, in seconds, included a compilation; it is cached, so paid only once.
_COMPILED = 12.0
#: Share of evaluations that are the best so far, and write a checkpoint (most of these are early).
_IMPROVED = 0.5


@dataclass(frozen=True)
class PlannedJob:
    """A job to run, with its frames (language: samples), some of which may be done."""

    name: str
    config: JobConfig
    done: int = 0


def print_plan(args: argparse.Namespace) -> None:
    """Check the jobs, measure each kind, and print the expected time and peak memory.

    Raises:
        ConfigError: a job is refused.
    """
    jobs, finished, launcher = make_plan(args)
    total = len(jobs) + finished
    done = f", {finished} finished before" if finished else ""
    print(f"{total} job{'s' * (total != 1)}{done}, {len(jobs)} to run", flush=True)
    if not jobs:
        return
    cores = os.cpu_count() or 1
    devices = cuda_devices() if launcher.on_this_machine else 0
    at_once = max(min(launcher.at_once(len(jobs), cores, devices), len(jobs)), 1)
    costs = measured(jobs, min(at_once, cores) if launcher.on_this_machine else 1)
    print(table(jobs, costs))
    needed = at_once * max(cost.memory for cost in costs.values())
    seconds = sweep_seconds(jobs, costs, launcher, at_once)
    print(
        f"expected: {duration(seconds)} with launcher={launcher.name}, {at_once} at a time, "
        f"{needed / 1e9:.1f} GB"
    )


def make_plan(args: argparse.Namespace) -> tuple[list[PlannedJob], int, LauncherConfig]:
    """Return the jobs of a command line, how many are already finished, and the launcher."""
    sweep = split_overrides(args.overrides)
    launcher, search = sweep_settings(sweep.own, args)
    if not args.multirun and (sweep.own or sweep.name):
        raise ConfigError(f"{(sweep.own or ['sweep'])[0]}: only a sweep reads it; add -m")
    if isinstance(search, OptunaConfig):
        from klrl.sweep.search import space_of  # imports optuna

        space = space_of(sweep.job)
        trial = space.jobs(space.middle)
        checked = check_jobs(trial, args) * search.trials
        return [PlannedJob("trial", config) for _, config in checked], 0, launcher
    checked = check_jobs(expand(sweep.job) if args.multirun else [sweep.job], args)
    folder = Path("outputs") / sweep.name if sweep.name else Path(sweep.folder or "outputs/.new")
    status = by_status(make_jobs(folder, named(sweep, checked)))
    jobs = []
    for job in (job for each in OPEN for job in status[each]):
        run = RunFolder(job.folder)
        done = run.manifest.get(domain_of(job.config).axis, 0) if run.exists else 0
        jobs.append(PlannedJob(job.name, job.config, int(done)))
    return jobs, len(status[FINISHED]), launcher


def measured(jobs: Sequence[PlannedJob], at_once: int) -> dict[str, Cost]:
    """Measure the cost of each kind of job: of its longest job, several copies at a time."""
    costs = {}
    for job in sorted(jobs, key=lambda job: -job.config.frames):
        kind = kind_of(job.config)
        if kind not in costs:
            costs[kind] = cost = _probe(job, at_once)
            if cost.start > _COMPILED:
                costs[kind] = _probe(job, at_once)
    return costs


def _probe(job: PlannedJob, copies: int) -> Cost:
    """Measure a job in several processes at a time; return the mean cost."""
    also = f", {copies} at a time" if copies > 1 else ""
    print(f"  measuring {job.name} for {SECONDS:g} s{also} ...", file=sys.stderr, flush=True)
    asked = {"settings": asdict(job.config), "seconds": SECONDS}
    command = [sys.executable, "-m", "klrl.sweep.probe"]

    def run(_: int) -> Cost:
        request = json.dumps({**asked, "started": time.time()})
        done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
            raise ConfigError(f"{job.name}: fails when it is tried: {last}; run it by itself")
        return Cost(**json.loads(done.stdout.strip().splitlines()[-1]))

    with ThreadPoolExecutor(copies) as threads:
        costs = list(threads.map(run, range(copies)))
    numbers = ("start", "job", "iteration", "episode", "checkpoint")
    return replace(costs[0], **{name: mean(getattr(c, name) for c in costs) for name in numbers})


def table(jobs: Sequence[PlannedJob], costs: Mapping[str, Cost]) -> str:
    """Format a line per kind of job."""
    lines = [("kind of job, as in", "jobs", "frames", "frames/s", "each", "memory")]
    for kind, cost in costs.items():
        same = [job for job in jobs if kind_of(job.config) == kind]
        each = mean(job_seconds(job, cost) for job in same)
        speed = same[0].config.frames_per_iteration / cost.iteration
        frames = mean(job.config.iterations * job.config.frames_per_iteration for job in same)
        size = f"{cost.memory / 1e9:.1f} GB"
        lines.append(
            (same[0].name, str(len(same)), f"{frames:,.0f}", f"{speed:,.0f}", duration(each), size)
        )
    return text_table(lines, right=range(1, 6), indent=2)


def kind_of(config: JobConfig) -> str:
    """Return a key that is equal for jobs with the same cost per iteration.

    Seed, frames and real numbers (coefficients, targets, rates) do not change that cost.
    """
    settings = flat_settings(config)
    kept = {k: v for k, v in settings.items() if not isinstance(v, float)}
    del kept["seed"], kept["frames"]
    return repr(sorted(kept.items()))


def job_seconds(job: PlannedJob, cost: Cost) -> float:
    """Return the seconds of a job in a process that has run a job of its kind before."""
    config = job.config
    share = 1 - job.done / config.frames
    iterations = config.iterations * share
    planned = schedule(config, cost.longest)
    evaluations = len(planned.iterations) * share
    checkpoints = 1 + iterations / config.checkpoint.every + _IMPROVED * evaluations
    # There are two closing evaluations: of the last policy and of the best.
    closing = fitting(planned.closing, cost.longest) * (2 if planned.iterations else 1)
    episodes = evaluations * fitting(planned.size, cost.longest) + closing
    return (
        cost.job
        + iterations * cost.iteration
        + episodes * cost.episode
        + checkpoints * cost.checkpoint
    )


def sweep_seconds(
    jobs: Sequence[PlannedJob], costs: Mapping[str, Cost], launcher: LauncherConfig, at_once: int
) -> float:
    """Return the wall time of all jobs in seconds; each goes to the process that is free first."""
    free = [0.0] * at_once  # time when each process is free
    for job in jobs:
        cost = costs[kind_of(job.config)]
        at = heapq.heappop(free)
        # The first job of a process pays its start; with submitit every job has a new process.
        start = cost.start if not at or launcher.name == "submitit" else 0.0
        heapq.heappush(free, at + start + job_seconds(job, cost))
    return max(free)
