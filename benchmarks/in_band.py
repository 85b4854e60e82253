"""How often KL(old||new) ends an iteration near its target, by beta rule.

    python benchmarks/in_band.py --envs pendulum half_cheetah --seeds 0 1 2

Prints, per environment and rule, the share of iterations after the tenth whose KL(old||new) lies
within a factor 1.5 of ``loss.dtarg``, its range over seeds, and the last training returns.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FRAMES = {"pendulum": 100_000, "half_cheetah": 200_000, "hopper": 200_000}


RULES = {
    "doubling": ["loss=klpen", "loss.beta_rule=doubling"],
    "proportional": ["loss=klpen", "loss.beta_rule=proportional"],
    "forward": ["loss=klpen", "loss.beta_rule=forward"],
    "held": ["loss=klpen_held"],
}


def run(folder: Path, env: str, rule: str, seed: int, dtarg: float, frames: int) -> list[dict]:
    """Train once; returns the rows."""
    words = [
        f"env={env}",
        *RULES[rule],
        f"loss.dtarg={dtarg}",
        f"seed={seed}",
        f"frames={frames}",
        "logger=none",
        "eval.every=0",
        f"hydra.run.dir={folder}",
    ]
    command = [sys.executable, "-m", "klrl", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not (folder / "metrics.jsonl").exists():
        raise SystemExit(done.stderr)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def share(rows: list[dict], dtarg: float) -> float:
    """Share of the iterations after the tenth within a factor 1.5 of the target."""
    kls = [row["kl/old/exact"] for row in rows[10:]]
    inside = [abs(math.log(max(kl, 1e-12) / dtarg)) <= math.log(1.5) for kl in kls]
    return sum(inside) / len(inside)


def final_return(rows: list[dict]) -> float:
    """Mean return of the last ten iterations that ended episodes."""
    ended = [row["reward/episode"] for row in rows if "reward/episode" in row]
    return statistics.mean(ended[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--envs", nargs="+", default=["pendulum", "half_cheetah"])
    parser.add_argument(
        "--rules", nargs="+", default=["held", "doubling", "forward"], choices=RULES
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--dtarg", type=float, default=0.01)
    parser.add_argument("--frames", type=int, help="default: 100k pendulum, 200k MuJoCo")
    args = parser.parse_args()
    print("| env | rule | in band: median [range] | last training return: median [range] |")
    print("|---|---|---|---|", flush=True)
    for env in args.envs:
        for rule in args.rules:
            shares, returns = [], []
            for seed in args.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    frames = args.frames or FRAMES[env]
                    rows = run(Path(folder), env, rule, seed, args.dtarg, frames)
                shares.append(share(rows, args.dtarg))
                returns.append(final_return(rows))
            told = [
                f"{statistics.median(x):.{n}f} [{min(x):.{n}f}, {max(x):.{n}f}]"
                for x, n in ((shares, 2), (returns, 0))
            ]
            print(f"| {env} | {rule} | {told[0]} | {told[1]} |", flush=True)


if __name__ == "__main__":
    main()
