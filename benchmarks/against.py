"""CPU time per frame of this checkout and of another, on MuJoCo tasks, in turn.

    python -m benchmarks.against ../before                 # hopper and half_cheetah, five rounds
    python -m benchmarks.against ../before --env hopper --rounds 3 --words env.num_envs=16

The presets, with the update compiled; a reference, no evaluation. Each run is a process of its own
on one thread, and its first iteration is not counted. Ratios are taken within a round. The rows of
both must be equal, times left out, else the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, environment
from benchmarks.rounds import Failed, last_words, rounds, spread
from benchmarks.same_rows import read_rows

#: The run, in a process of its own: prints CPU microseconds per frame.
CODE = """
import json, time
from klrl.__main__ import main
from klrl.train.loop import Training

laps, make_row = [], Training.make_row
def counted(self, batch, *rest):
    laps.append((time.process_time(), batch.numel()))
    return make_row(self, batch, *rest)
Training.make_row = counted
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
frames = sum(count for _, count in laps[1:])
print(json.dumps({"us": 1e6 * (laps[-1][0] - laps[0][0]) / frames}))
"""


def run(tree: Path, env: str, frames: int, words: list[str]) -> dict[str, Any]:
    """One run with a checkout's klrl: CPU times and rows."""
    fixed = [f"env={env}", "loss=klpen", f"frames={frames}", "threads=1", "device=cpu"]
    fixed += ["logger=none", "eval.every=0", "learner.compile=aot", "hydra.run.dir=run"]
    given = {word.partition("=")[0] for word in words}  # takes the place of what is fixed
    fixed = [word for word in fixed if word.partition("=")[0] not in given] + words
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", CODE, *fixed],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**environment(), "PYTHONPATH": str(tree.resolve())},
        )
        if done.returncode:
            raise Failed(last_words(done.stderr))
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**found, "rows": read_rows(Path(folder) / "run" / "metrics.jsonl")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", type=Path, help="a checkout to compare with")
    parser.add_argument("--env", nargs="+", default=["hopper", "half_cheetah"])
    parser.add_argument("--frames", type=int, default=40960)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", nargs="+", default=[], help="for klrl's command line")
    args = parser.parse_args()
    equal = True
    for env in args.env:
        tasks = {
            name: lambda _, tree=tree, env=env: run(tree, env, args.frames, args.words)
            for name, tree in {"before": args.other, "now": ROOT}.items()
        }
        told = rounds(tasks, args.rounds, lambda line: f"{line['us']:.1f} us of CPU per frame")
        if any(isinstance(line, str) for lines in told.values() for line in lines):
            sys.exit(1)
        before, now = told["before"], told["now"]
        equal &= all(line["rows"] == before[0]["rows"] for line in (*before, *now))
        each = {name: spread([line["us"] for line in lines]) for name, lines in told.items()}
        ratio = spread([b["us"] / n["us"] for b, n in zip(before, now, strict=True)])
        print(env, each, "ratio", ratio)
    print("rows: equal" if equal else "rows: they differ")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
