"""Resident size of a long run at 10 % of its frames and at the end; time to the first frame.

    python -m benchmarks.memory                     # the main job for 1M frames, five starts
    python -m benchmarks.memory --frames 200000 --no-save logger=none

Targets: the end at most 1.05 x the size at 10 %; the first frame at most 3 s after torch,
tensordict and TorchRL are imported. Needs /proc, that is Linux.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, environment, save
from benchmarks.watched import status_mb, watch

ENOUGH = 1.05
START_LIMIT = 3.0

# Runs the command line in a process whose libraries are already imported, until the simulator has
# made its first step. What klrl imports of TorchRL is imported before, as "TorchRL".
FIRST_FRAME = """
import sys, time
import torch, tensordict, tensordict.nn, torchrl
import torchrl.checkpoint, torchrl.collectors, torchrl.data, torchrl.envs, torchrl.modules
import torchrl.objectives, torchrl.objectives.value
imported = time.time()

def first_frame():
    # Where torch and TorchRL are imported already, this costs what a run pays for it anyway.
    from klrl.control.copies import VectorGymEnv
    step = VectorGymEnv.step_native
    def stop(self, action):
        step(self, action)
        print("FIRST", imported, time.time(), file=sys.__stdout__, flush=True)
        __import__("os")._exit(0)
    VectorGymEnv.step_native = stop

first_frame()
from klrl.__main__ import main
main(sys.argv[1:])
"""


# ----------------------------------------------------------------------------------------- start


def start_seconds(words: Sequence[str]) -> dict[str, float]:
    """Seconds from the process's start to the imports' end, and from there to the first frame."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FIRST_FRAME, *words, f"hydra.run.dir={folder}/run"]
        begun = time.time()
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment(), check=False
        )
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("FIRST")]
    if not told:
        raise SystemExit(done.stderr or done.stdout)
    imported, first = map(float, told[0][1:])
    return {"imports": imported - begun, "after": first - imported}


# ---------------------------------------------------------------------------------------- memory


def frames_done(metrics: Path) -> int:
    """Frames of the last whole line of a metrics.jsonl; 0 before the first."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(metrics.stat().st_size - 4096, 0))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["frames"]) if whole else 0


def sizes(frames: int, words: Sequence[str]) -> list[tuple[int, float]]:
    """Run the command line; (frames, MB) every 0.1 s."""
    seen = []

    def look(pid: int, run: Path) -> None:
        done = frames_done(run / "metrics.jsonl")
        # What comes after the last row (curves.png) is no part of the loop.
        if 0 < done < frames and (size := status_mb(pid, "VmRSS")) is not None:
            seen.append((done, size))

    watch([*words, f"frames={frames}"], look, every=0.1)
    return seen


def size_near(seen: Sequence[tuple[int, float]], frames: int, at: float) -> float:
    """Median of the sizes within 1 % of the frames around a share of them, or the nearest one."""
    near = [size for done, size in seen if abs(done / frames - at) <= 0.01]
    nearest = min(seen, key=lambda pair: abs(pair[0] / frames - at))[1]
    return statistics.median(near or [nearest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("words", nargs="*", help="words for klrl's command line")
    args = parser.parse_args()
    words = args.words or ["env=pendulum", "kl.coef=0.1"]
    starts = [start_seconds(words) for _ in range(args.starts)]
    start: dict[str, Any] = {}
    for key in ("imports", "after"):
        values = [round(found[key], 2) for found in starts]
        start[key] = {"median": statistics.median(values), "rounds": values}
    print(f"first frame after the imports: {start['after']} s; imports: {start['imports']} s")
    seen = sizes(args.frames, words)
    early, late = (size_near(seen, args.frames, at) for at in (0.1, 0.99))
    print(f"resident: {early:.1f} MB at 10 %, {late:.1f} MB at the end, {late / early:.3f} x")
    if not args.no_save:
        data = {
            "command": f"python -m klrl {' '.join(words)}",
            "frames": args.frames,
            "resident_mb": {"early": round(early, 1), "late": round(late, 1)},
            "start_seconds": start,
        }
        print(save("memory", data).relative_to(ROOT))
    if late > ENOUGH * early or start["after"]["median"] > START_LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
