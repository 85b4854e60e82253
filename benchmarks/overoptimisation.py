"""Over-optimisation of a flawed reward, and what KL(policy||reference) does about it.

    python benchmarks/overoptimisation.py --coefs 0 0.02 0.1 0.5 --seeds 0 1 2

Trains on env.reward=proxy, which counts the digits that were asked for and lets any others stand,
and measures the gold score beside it (Gao, Schulman and Hilton 2022, "Scaling laws for reward model
overoptimization"). Prints, per kl.coef, the mean over the last tenth of the iterations: proxy,
gold, KL per token and per response; and the best gold score of any tenth before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = ("proxy", "gold", "best gold", "KL per token", "KL per response")


def run(folder: Path, words: list[str]) -> list[dict]:
    """Train once; returns the rows."""
    common = ["experiment=sort_digits", "env.reward=proxy", "logger=none", "eval.every=0"]
    command = [sys.executable, "-m", "klrl", *common, f"hydra.run.dir={folder}", *words]
    subprocess.run(command, check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(rows: list[dict]) -> list[float]:
    """The numbers of :data:`COLUMNS`, of one run."""
    tenth = max(1, len(rows) // 10)

    def mean(name: str, part: list[dict]) -> float:
        return statistics.mean(row[name] for row in part)

    last = rows[-tenth:]
    gold = [mean("reward/gold", rows[i : i + tenth]) for i in range(0, len(rows), tenth)]
    kl = [mean(f"kl/ref/{name}", last) for name in ("exact", "exact_seq")]
    return [mean("reward/episode", last), mean("reward/gold", last), max(gold), *kl]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--coefs", nargs="+", type=float, default=[0, 0.02, 0.1, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=20_480)
    parser.add_argument("words", nargs="*", help="more settings, as optim.lr=2e-4")
    args = parser.parse_args()
    print(f"| kl.coef | {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    for coef in args.coefs:
        found = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                words = [f"kl.coef={coef:g}", f"seed={seed}", f"frames={args.samples}", *args.words]
                found.append(summary(run(Path(folder), words)))
        told = [
            f"{statistics.median(x):.3f} [{min(x):.3f}, {max(x):.3f}]"
            for x in zip(*found, strict=True)
        ]
        print(f"| {coef:g} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
