"""The wall time and memory of a sweep, from the cost of each part of a job: plain arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from klrl.config import JobConfig, LauncherConfig
from klrl.sweep.jobs import flat_settings
from klrl.sweep.probe import Cost

#: Share of the evaluations that are the best so far, and write a checkpoint; most of them early.
_IMPROVED = 0.5


@dataclass(frozen=True)
class Planned:
    """A job to run.

    Attributes:
        name: its folder's name.
        overrides: those of its command line.
        config: its settings.
        done: frames (language: samples) done before.
    """

    name: str
    overrides: tuple[str, ...]
    config: JobConfig
    done: int = 0


def kind_of(config: JobConfig) -> str:
    """A key that is equal for two jobs which cost the same per iteration.

    The seed and real-valued settings (coefficients, targets, rates) are left out: they change what
    is learned, not how long it takes.
    """
    settings = flat_settings(config)
    kept = {k: v for k, v in settings.items() if not isinstance(v, float)}
    for free in ("seed", "frames"):
        del kept[free]
    return repr(sorted(kept.items(), key=lambda item: item[0]))


def job_seconds(job: Planned, cost: Cost) -> float:
    """Seconds of a job in a process that has run a job of its kind before."""
    config = job.config
    share = 1 - job.done / config.frames
    iterations = config.iterations * share
    evaluations = iterations / config.eval.every if config.eval.every else 0.0
    checkpoints = 1 + iterations / config.checkpoint.every + _IMPROVED * evaluations
    return (
        cost.job
        + iterations * cost.iteration
        + evaluations * cost.evaluation
        + checkpoints * cost.checkpoint
    )


def slots(launcher: LauncherConfig, jobs: int, cores: int) -> int:
    """Jobs that run at a time."""
    return max(min(launcher.at_once(jobs, cores), jobs), 1)


def sweep_seconds(
    jobs: Sequence[Planned], costs: Mapping[str, Cost], launcher: LauncherConfig, at_once: int
) -> float:
    """Wall time of all jobs in seconds; each goes to the process that is free first.

    The first job of a process pays the process's start; with submitit every job has a new one.
    """
    if not jobs:
        return 0.0
    free = [0.0] * at_once
    fresh = set(range(at_once))
    queue = [(0.0, slot) for slot in range(at_once)]
    heapq.heapify(queue)
    for job in jobs:
        cost = costs[kind_of(job.config)]
        at, slot = heapq.heappop(queue)
        if slot in fresh or launcher.name == "submitit":
            at += cost.start
            fresh.discard(slot)
        at += job_seconds(job, cost)
        free[slot] = at
        heapq.heappush(queue, (at, slot))
    return max(free)


def memory(costs: Mapping[str, Cost], at_once: int) -> int:
    """Peak memory of ``at_once`` processes in bytes, each counted with the largest job's peak."""
    return at_once * max((cost.memory + cost.children for cost in costs.values()), default=0)
