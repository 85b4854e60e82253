"""How controllers of kl.coef hold KL(policy||reference) at a target.

    python benchmarks/kl_tracking.py --target 0.3 --seeds 0 1 2

Prints, per controller, the share of the iterations in the last half of the run whose KL lies within
25 % of the target, its mean over that half relative to the target, and the last training returns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def run(folder: Path, words: list[str]) -> list[dict]:
    """Train once; returns the rows."""
    common = ["env=pendulum", "logger=none", "eval.every=0", f"hydra.run.dir={folder}"]
    subprocess.run([sys.executable, "-m", "klrl", *common, *words], check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=float, default=0.3, help="nats per frame")
    parser.add_argument("--coef", type=float, default=0.3, help="kl.coef at the start")
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    target, coef = f"controller.target={args.target}", f"kl.coef={args.coef}"
    choices = {
        f"fixed (coef {args.coef})": ["controller=fixed"],
        "adaptive": ["controller=adaptive", target],
        "dual": ["controller=dual", target],
    }
    print("| controller | mean KL / target, last half | iterations within 25 % | last return |")
    print("|---|---|---|---|", flush=True)
    for name, words in choices.items():
        means, shares, returns = [], [], []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                rows = run(Path(folder), [*words, coef, f"seed={seed}", f"frames={args.frames}"])
            half = [row["kl/ref/exact"] / args.target for row in rows[len(rows) // 2 :]]
            means.append(statistics.mean(half))
            shares.append(sum(0.75 <= kl <= 1.25 for kl in half) / len(half))
            ended = [row["reward/episode"] for row in rows if "reward/episode" in row]
            returns.append(statistics.mean(ended[-10:]))
        told = [
            f"{statistics.median(x):.{n}f} [{min(x):.{n}f}, {max(x):.{n}f}]"
            for x, n in ((means, 2), (shares, 2), (returns, 0))
        ]
        print(f"| {name} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
