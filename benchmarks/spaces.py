"""Pixels, masked actions and several actions are learned: the return of three seeds, by task.

    python -m benchmarks.spaces                      # what is missing, then the table
    python -m benchmarks.spaces --tasks catch --seeds 0
    python -m benchmarks.spaces --table              # from what is finished

One job at a time, one thread; a run ends with 100 episodes from start states of their own, of which
the table has the mean. A task is learned where each seed reaches its bar. CPU-seconds are the whole
process's, start and evaluations included. lunar_lander needs klrl[box2d].
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import klrl
from benchmarks.results import ROOT, environment, table

TOYS = "env=gym env.id=tests.control.toys:klrl-test"
FOLDER = ROOT / "outputs" / "spaces"


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        words: the overrides.
        bar: the return that each seed is to reach.
        best: the largest return there is, or what counts as solved.
    """

    words: str
    bar: float
    best: float


TASKS = {
    # 42 x 42 pixels; .9 of the largest return.
    "catch": Task("env=catch kl.coef=0.01", 0.9, 1.0),
    # Half of six actions is excluded in every state, which only the mask says.
    "masked": Task(f"{TOYS}/Masked-v0 frames=50000 optim.lr=1e-3", 34.0, 36.0),
    "masked_info": Task(
        f"{TOYS}/Masked-v0 env.kwargs.where=info env.action_mask=info frames=50000 optim.lr=1e-3",
        *(34.0, 36.0),
    ),
    # 3 x 2 x 4 actions, of which the observation shows the right ones.
    "multi_discrete": Task(f"{TOYS}/Copying-v0 frames=100000 optim.lr=1e-3", 7.2, 8.0),
    "keys": Task(f"{TOYS}/Keyed-v0 env.kwargs.image=false frames=50000 optim.lr=1e-3", 7.2, 8.0),
    "lunar_lander": Task("env=lunar_lander kl.coef=0.01", 200.0, 200.0),
}


def folder(task: str, seed: int) -> Path:
    """Of a run."""
    return FOLDER / f"{task}_{seed}"


def train(task: str, seed: int) -> None:
    """One run, and beside its folder the CPU-seconds that it took."""
    where = folder(task, seed)
    words = [*TASKS[task].words.split(), f"seed={seed}", "device=cpu", "threads=1", "logger=none"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "klrl", *words, f"hydra.run.dir={where}"],
        check=True,
        cwd=ROOT,
        env=environment(),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (where / "cpu.json").write_text(json.dumps({"cpu_seconds": seconds}), encoding="utf-8")


def rows(tasks: Sequence[str], seeds: Sequence[int]) -> list[list[str]]:
    """One row for each task with a finished run."""
    told = []
    for task in tasks:
        done = [folder(task, seed) for seed in seeds if (folder(task, seed) / "cpu.json").is_file()]
        if not done:
            continue
        runs = [klrl.load_run(each).summary for each in done]
        returns = [float(each["return"]) for each in runs]
        cpu = [json.loads((each / "cpu.json").read_text("utf-8"))["cpu_seconds"] for each in done]
        reached = sum(value >= TASKS[task].bar for value in returns)
        told.append([
            task, f"{runs[0]['frames']:,}", f"{len(done)}", f"{median(returns):.4g}",
            f"{min(returns):.4g} to {max(returns):.4g}", f"{TASKS[task].bar:g}",
            f"{reached} of {len(done)}", f"{median(cpu):.0f}",
        ])  # fmt: skip
    return told


HEAD = ["task", "frames", "seeds", "median", "range", "bar", "reached by", "CPU-s"]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    for task in args.tasks:
        for seed in args.seeds:
            if not args.table and not (folder(task, seed) / "cpu.json").is_file():
                train(task, seed)
    print(table(HEAD, rows(args.tasks, args.seeds)))


if __name__ == "__main__":
    main()
