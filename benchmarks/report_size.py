"""How long ``klrl.report`` takes, and how much memory, on many runs.

    python benchmarks/report_size.py --runs 500 --rows 500

Makes synthetic run folders (five seeds per setting; numbers from a seeded generator, no training)
and prints seconds and peak memory of the report on them. ``--keep FOLDER`` leaves everything there.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEEDS = 5
METHODS = ("legacy", "retrieve")


def write_run(folder: Path, method: str, coef: float, seed: int, rows: int) -> None:
    """One run folder with what the report reads."""
    (folder / ".hydra").mkdir(parents=True)
    settings = {
        "frames": rows * 1024,
        "seed": seed,
        "env": {"id": "Synthetic-v1", "num_envs": 8},
        "kl": {"mode": method, "coef": coef},
        "loss": {"name": "klpen", "dtarg": 0.01, "beta": 1.0},
        "logger": {"name": "none"},
    }
    # JSON is YAML.
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(settings))
    words = f"python -m klrl -m kl={method} kl.coef={coef:g} seed={seed}".split()
    manifest = {"klrl": "0.3.0", "status": "finished", "seed": seed, "argv": words, "pid": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rng = random.Random(f"{method} {coef} {seed}")
    best = -200 - 300 * coef**0.5 - (50 if method == "legacy" else 0) + rng.gauss(0, 40)
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(1, rows + 1):
            file.write(json.dumps(make_row(i, best, coef, i / rows, rng)) + "\n")


def make_row(i: int, best: float, coef: float, done: float, rng: random.Random) -> dict:
    """As many numbers as a row of training holds."""
    kl = done / (0.05 + coef) * math.exp(rng.gauss(0, 0.2))
    row = {
        "iteration": i,
        "frames": i * 1024,
        "kl/ref/coef": coef,
        "kl/ref/penalty": coef * kl,
        "kl/old/exact": 0.01 * math.exp(rng.gauss(0, 0.4)),
        "kl/old/beta": math.exp(rng.gauss(0, 0.3)),
        "time/iteration": 0.5 * math.exp(rng.gauss(0, 0.1)),
        "time/frames_per_second": 2048 * math.exp(rng.gauss(0, 0.1)),
        "reward/episode": best - 1000 * math.exp(-5 * done) + rng.gauss(0, 60),
        **{f"kl/ref/{name}": kl for name in ("exact", "k1", "k2", "k3")},
        **{f"loss/{name}": rng.random() for name in ("objective", "critic", "entropy")},
        **{f"reward/{name}": rng.random() for name in ("raw", "shaped", "episode_length")},
        **{f"learner/{name}": rng.random() for name in ("grad_norm", "lr", "epochs", "alpha")},
        "policy/entropy": rng.random(),
    }
    if i % 10 == 0:
        row["eval/return"] = row["reward/episode"] + rng.gauss(20, 20)
    return row


def write_runs(root: Path, runs: int, rows: int) -> None:
    """Settings of two methods and rising coefficients, five seeds each."""
    for i in range(runs):
        setting, seed = divmod(i, SEEDS)
        rung, method = divmod(setting, len(METHODS))
        coef = round(0.01 * 1.15**rung, 6)
        write_run(root / f"run_{i:04d}", METHODS[method], coef, seed, rows)


def measure(root: Path) -> tuple[float, float]:
    """Seconds and peak MB of the report, in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "klrl.report", str(root)])
    _, code, usage = os.wait4(process.pid, 0)
    if code:
        raise SystemExit("the report failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs and the report")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as away:
        root = args.keep or Path(away)
        write_runs(root, args.runs, args.rows)
        seconds, megabytes = measure(root)
    print(f"{args.runs} runs x {args.rows} rows: {seconds:.1f} s, {megabytes:.0f} MB")


if __name__ == "__main__":
    main()
