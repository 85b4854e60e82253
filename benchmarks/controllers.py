"""How near controllers of kl.coef hold KL(policy||reference) to a target, seed by seed.

    python -m benchmarks.controllers                # what is missing, then the tables
    python -m benchmarks.controllers --controllers held --envs hopper --seeds 0 1
    python -m benchmarks.controllers --controllers held --seeds 100 --words controller.integral=0.1
    python -m benchmarks.controllers --tables       # from what is finished

One job at a time, with one thread. Each finished one is a JSON file in ``--folder``, so that the
command goes on where it stopped; a job whose settings changed since is run again. Gains are tried
on seeds from 100 on, with ``--words``; what is shown has seeds 0 to 4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.results import ROOT, environment, machine, table
from benchmarks.rounds import last_words
from klrl import compose
from klrl.config.identity import identity

ENVS = ("pendulum", "hopper", "half_cheetah")
CONTROLLERS = ("held", "dual", "adaptive", "fixed")
SEEDS = (0, 1, 2, 3, 4)
TARGET, COEF, FRAMES, NEAR = 0.3, 0.3, 300_000, 0.25
#: What held must reach: medians over the seeds.
RATIO, SHARE = (0.85, 1.15), 0.75
FOLDER = ROOT / "benchmarks" / "results" / "controllers"

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One job.

    Attributes:
        env, controller, seed: of the job.
        words: further overrides, which its file is named after.
    """

    env: str
    controller: str
    seed: int
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its file."""
        parts = (self.env, self.controller, str(self.seed), *self.words)
        return "_".join(part.replace("controller.", "") for part in parts) + ".json"

    @property
    def overrides(self) -> list[str]:
        """What follows ``python -m klrl``."""
        fixed = ["device=cpu", "threads=1", "logger=none", "eval.every=0"]
        job = [f"env={self.env}", f"controller={self.controller}", f"seed={self.seed}"]
        target = [] if self.controller == "fixed" else [f"controller.target={TARGET}"]
        return [*job, f"frames={FRAMES}", f"kl.coef={COEF}", *target, *fixed, *self.words]

    @property
    def identity(self) -> list[str | int]:
        """Of its settings, those of ``conf/`` among them, and of klrl's arithmetic."""
        return list(identity(compose(*self.overrides)))


def run(cell: Cell) -> dict[str, Any]:
    """Train, and keep KL / target and kl.coef of every iteration.

    Raises:
        SystemExit: the job failed; the message is the last thing that it said.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "klrl", *cell.overrides, f"hydra.run.dir={work}/run"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment())
        if done.returncode:
            raise SystemExit(f"{cell.name}: {last_words(done.stderr)} ({' '.join(command)})")
        lines = (Path(work) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        "overrides": cell.overrides,
        "identity": cell.identity,
        "machine": machine(),
        "seconds": round(time.perf_counter() - began, 1),
        "ratio": [round(row["kl/ref/exact"] / TARGET, 4) for row in rows],
        "coef": [float(f"{row['kl/ref/coef']:.4g}") for row in rows],
        "return": round(_return(last_half(rows)), 1),
    }


def _return(rows: Sequence[Mapping[str, float]]) -> float:
    """Of an episode, mean over all that ended."""
    ended = [
        (row["reward/episode"], row["reward/episodes"]) for row in rows if "reward/episode" in row
    ]
    return sum(value * count for value, count in ended) / sum(count for _, count in ended)


def last_half(values: Sequence[T]) -> Sequence[T]:
    return values[len(values) // 2 :]


def held(ratios: Sequence[float]) -> tuple[float, float]:
    """Mean KL / target over the last half, and the share of its iterations within 25 %."""
    half = last_half(ratios)
    return sum(half) / len(half), sum(abs(ratio - 1) <= NEAR for ratio in half) / len(half)


def finished(folder: Path, cell: Cell) -> tuple[float, float, float] | None:
    """:func:`held` of a cell and its return; None where it was not run with these settings."""
    path = folder / cell.name
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    return (
        (*held(stored["ratio"]), stored["return"]) if stored["identity"] == cell.identity else None
    )


def tables(folder: Path, cells: Sequence[Cell]) -> Iterator[str]:
    """One table per environment: every seed, and the medians."""
    seeds = sorted({cell.seed for cell in cells})
    for env in dict.fromkeys(cell.env for cell in cells):
        rows = []
        for controller, words in dict.fromkeys((c.controller, c.words) for c in cells):
            figures = [finished(folder, Cell(env, controller, seed, words)) for seed in seeds]
            values = [value for value in figures if value is not None]
            if not values:
                continue
            each = ["-" if v is None else f"{v[0]:.2f}, {v[1]:.2f}" for v in figures]
            ratio, share, episode = (median(column) for column in zip(*values, strict=True))
            verdict = "yes" if RATIO[0] <= ratio <= RATIO[1] and share >= SHARE else "no"
            middle = f"{ratio:.2f}, {share:.2f}"
            name = " ".join((controller, *words))
            rows.append([name, *each, middle, verdict, f"{episode:,.0f}"])
        header = [env, *(f"seed {seed}" for seed in seeds), "median", "holds", "return, median"]
        yield table(header, rows)


def main() -> None:
    """Run what is missing, one job at a time, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--envs", nargs="+", choices=ENVS, default=ENVS)
    parser.add_argument("--controllers", nargs="+", choices=CONTROLLERS, default=CONTROLLERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--words", nargs="+", default=[], help="further overrides of all jobs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the finished jobs")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    cells = [
        Cell(env, controller, seed, tuple(args.words))
        for seed in args.seeds
        for controller in args.controllers
        for env in args.envs
    ]
    args.folder.mkdir(parents=True, exist_ok=True)
    for cell in [] if args.tables else cells:
        if finished(args.folder, cell) is None:
            result = run(cell)
            (args.folder / cell.name).write_text(json.dumps(result) + "\n", encoding="utf-8")
            ratio, share = held(result["ratio"])
            print(f"{cell.name}: {ratio:.2f}, {share:.2f}, {result['seconds']:.0f} s", flush=True)
    print("mean KL / target, share of iterations within 25 %, both over the last half\n")
    print("\n\n".join(tables(args.folder, cells)))


if __name__ == "__main__":
    main()
