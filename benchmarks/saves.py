"""Bytes of a checkpoint and milliseconds of a save, for a control and a language run.

    python -m benchmarks.saves                        # this version
    python -m benchmarks.saves --tree ../before       # beside the version of another checkout

Every iteration of a short run saves ``last``; versions alternate, and the medians are printed. Of a
control run that includes the state of the environments, whose bytes and milliseconds of CPU stand
beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
JOBS = {
    "pendulum": "env=pendulum frames=8192 env.num_envs=4 collector.steps=64 learner.compile=false",
    "half_cheetah": "env=half_cheetah frames=8192 env.num_envs=4 collector.steps=64 "
    "learner.compile=false",
    "ant": "env=ant frames=8192 env.num_envs=4 collector.steps=64 learner.compile=false",
    "sort_digits": "experiment=sort_digits frames=320 collector.prompts=4",
}
COMMON = "checkpoint.every=1 eval.every=0 logger=none device=cpu threads=1 hydra.run.dir=run"
#: Run by each version's own klrl: its saves, timed from outside.
PROGRAM = """
import json, sys, time
from pathlib import Path
from klrl.runs.checkpoint import Checkpoints
save, seconds = Checkpoints.save, []
def timed(self, which, *args):
    began = time.perf_counter()
    save(self, which, *args)
    if which == "last":
        seconds.append(time.perf_counter() - began)
Checkpoints.save = timed
states = []
try:
    RunningEpisodes = importlib.import_module("klrl.control.resumption").RunningEpisodes
except ModuleNotFoundError:  # before environments were saved
    RunningEpisodes = None
else:
    state_dict = RunningEpisodes.state_dict
    def timed_state(self):
        began = time.process_time()
        state = state_dict(self)
        states.append(time.process_time() - began)
        return state
    RunningEpisodes.state_dict = timed_state
from klrl.__main__ import main
sys.argv = ["klrl", *sys.argv[1:]]
try:
    main()
finally:
    entry = max(Path("run/checkpoints/last").iterdir())
    size = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
    rollout = entry / "rollout.safetensors"
    of_state = rollout.stat().st_size if rollout.exists() else 0
    told = {"seconds": seconds[1:], "bytes": size, "states": states[1:], "of_state": of_state}
    Path("saves.json").write_text(json.dumps(told))
"""


@dataclass(frozen=True)
class Saves:
    """What a run's saves cost.

    Attributes:
        ms: of a save, the median.
        bytes: of an entry.
        state_ms: of the environments' state within it, CPU time.
        state_bytes: of that state.
    """

    ms: float
    bytes: int
    state_ms: float
    state_bytes: int


def measure(tree: Path, words: str) -> Saves:
    """What a run's saves cost."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *words.split(), *COMMON.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree)},
            check=False,  # main exits by itself; what it left says whether it worked
            capture_output=True,
        )
        saves = json.loads((Path(folder) / "saves.json").read_text())
    states = saves["states"] or [0.0]
    return Saves(
        1000 * median(saves["seconds"]), saves["bytes"], 1000 * median(states), saves["of_state"]
    )


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
            times = [saved[name].ms for saved in rounds]
            last = rounds[-1][name]
            print(
                f"{job:12} {name:5} {last.bytes:12,} bytes  {median(times):7.2f} ms "
                f"({min(times):.2f} to {max(times):.2f}); environments {last.state_bytes:,} bytes "
                f"{last.state_ms:.2f} ms"
            )


if __name__ == "__main__":
    main()
