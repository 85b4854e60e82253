"""Run what is missing of the third edition of docs/results/mujoco; protocol.md has the question.

    python -m benchmarks.mujoco docs/results/mujoco/third.jsonl --jobs 2

A line of the file is a finished run. Nothing is read of a run that another call left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from benchmarks.results import ROOT, commit, environment
from klrl.report.measures import column, final
from klrl.report.runs import read_run

TASKS = ("hopper", "half_cheetah", "swimmer", "walker2d", "ant")
SETTINGS = {
    "klpen_held_per_action": (
        *("loss=klpen_held", "loss.dtarg_per=action", "loss.dtarg=0.0035", "loss.max_alpha=2"),
    ),
    "trpo_small": ("loss=trpo", "loss.dtarg_per=action", "loss.dtarg=0.005"),
    "klpen_per_action": ("loss=klpen", "loss.dtarg_per=action", "loss.dtarg=0.01"),
}
COMMON = ("kl=none", "logger=none", "threads=1", "eval.evaluations=1", "eval.final=100")
#: Task, setting and seed, in the order of the runs: question B, then A seed by seed.
CELLS = [
    *(("hopper", name, seed) for seed in range(20) for name in list(SETTINGS)[:2]),
    *((task, "klpen_per_action", seed) for seed in range(10) for task in TASKS),
]
POINTS = 20


def run(task: str, name: str, seed: int) -> dict[str, Any]:
    """Run one cell in a process of its own; return its line."""
    words = [*COMMON, *SETTINGS[name]]
    with tempfile.TemporaryDirectory() as folder:
        command = [f"hydra.run.dir={folder}/run", f"env={task}", f"seed={seed}", *words]
        process = subprocess.Popen(
            [sys.executable, "-m", "klrl", *command],
            env=environment(), stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{task} {name} {seed}: exit {os.waitstatus_to_exitcode(status)}")
        found = read_run(Path(folder, "run"))
    trained = {x: column(found, x)[found.trained] for x in ("kl/old/exact", "reward/episode")}
    parts = np.array_split(np.arange(len(trained["reward/episode"])), POINTS)
    manifest = found.manifest
    return {
        "name": f"{task} {name} {seed}",
        "words": words,
        "return": float(column(found, "eval/return")[-1]),
        "se": float(column(found, "eval/return_se")[-1]),
        "training": final(found, "reward/episode"),
        "kl_old": float(np.nanmean(trained["kl/old/exact"])),
        "cpu": round(usage.ru_utime + usage.ru_stime, 1),
        "curve": [float(f"{np.nanmean(trained['reward/episode'][x]):.5g}") for x in parts],
        "compile": manifest["compile"],
        "numerics": manifest["numerics"],
        "processor": manifest["processor"],
        "versions": {x: manifest["versions"][x] for x in ("torch", "gymnasium", "mujoco", "numpy")},
        "commit": commit(),
    }


def main() -> None:
    """Run the cells that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    os.chdir(ROOT)
    lines = args.file.read_text().splitlines() if args.file.exists() else []
    known, lock = {json.loads(line)["name"] for line in lines}, Lock()

    def add(cell: tuple[str, str, int]) -> None:
        line = run(*cell)
        with lock, args.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    missing = [cell for cell in CELLS if "{} {} {}".format(*cell) not in known]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(add, missing))


if __name__ == "__main__":
    main()
