"""Bytes of a checkpoint and milliseconds of a save, for a control and a language run.

    python -m benchmarks.saves                        # this version
    python -m benchmarks.saves --tree ../before       # beside the version of another checkout

Every iteration of a short run saves ``last``; versions alternate, and the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
JOBS = {
    "pendulum": "env=pendulum frames=8192 env.num_envs=4 collector.steps=64 learner.compile=false",
    "half_cheetah": "env=half_cheetah frames=8192 env.num_envs=4 collector.steps=64 "
    "learner.compile=false",
    "sort_digits": "experiment=sort_digits frames=320 collector.prompts=4",
}
COMMON = "checkpoint.every=1 eval.every=0 logger=none device=cpu threads=1 hydra.run.dir=run"
#: Run by each version's own klrl: its saves, timed from outside.
PROGRAM = """
import importlib, json, sys, time
from pathlib import Path
try:
    module = importlib.import_module("klrl.runs.checkpoint")
except ModuleNotFoundError:  # 0.1.0
    module = importlib.import_module("klrl.checkpoint")
Checkpoints = module.Checkpoints
save, seconds = Checkpoints.save, []
def timed(self, which, *args):
    began = time.perf_counter()
    save(self, which, *args)
    if which == "last":
        seconds.append(time.perf_counter() - began)
Checkpoints.save = timed
from klrl.__main__ import main
sys.argv = ["klrl", *sys.argv[1:]]
try:
    main()
finally:
    entry = max(Path("run/checkpoints/last").iterdir())
    size = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
    Path("saves.json").write_text(json.dumps({"seconds": seconds[1:], "bytes": size}))
"""


def measure(tree: Path, words: str) -> tuple[float, int]:
    """Milliseconds of a save, the median of a run's; bytes of an entry."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *words.split(), *COMMON.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree)},
            check=False,  # main exits by itself; what it left says whether it worked
            capture_output=True,
        )
        saves = json.loads((Path(folder) / "saves.json").read_text())
    return 1000 * median(saves["seconds"]), saves["bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    trees = {"this": ROOT, **({"other": args.tree.resolve()} if args.tree else {})}
    for job, words in JOBS.items():
        rounds = [
            {name: measure(tree, words) for name, tree in trees.items()} for _ in range(args.rounds)
        ]
        for name in trees:
            times = [saved[name][0] for saved in rounds]
            size = rounds[-1][name][1]
            print(
                f"{job:12} {name:5} {size:12,} bytes  {median(times):7.2f} ms "
                f"({min(times):.2f} to {max(times):.2f})"
            )


if __name__ == "__main__":
    main()
