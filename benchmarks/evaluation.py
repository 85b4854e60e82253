"""Are the numbers that a run closes with true, is their standard error, and what do they cost?

    python -m benchmarks.evaluation             # what is missing, then the tables
    python -m benchmarks.evaluation --tables    # from what is finished

1. The main job, five seeds: its closing mean beside that of 1,000 fresh episodes.
2. One trained policy, 40 disjoint sets of 100 start states: the standard deviation of the 40 means
   beside the standard error that each states.
3. CPU time of evaluations, in % of the CPU time of training. Compiling is left out, which a process
   of its own does or a cache saves.

One job at a time, with one thread. Runs and figures stay below ``--folder``, so that the command
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from math import hypot
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import klrl
from benchmarks.results import table
from klrl.domains import domain_of
from klrl.train.callbacks import Callback, Loop
from klrl.train.evaluate import CLOSING

COMMON = ("kl.coef=0.1", "logger=none", "device=cpu", "threads=1")
#: name -> its words
JOBS = {
    **{f"pendulum_{seed}": ("env=pendulum", f"seed={seed}") for seed in range(5)},
    "half_cheetah": ("env=half_cheetah", "frames=300000"),
    "hopper": ("env=hopper", "frames=300000"),
    "sort_digits": ("experiment=sort_digits",),
}
MAIN = tuple(name for name in JOBS if name.startswith("pendulum"))
#: Whose standard error is compared with that of 40 sets.
REPEATED = ("pendulum_0", "half_cheetah")
SETS, EPISODES, FRESH = 40, 100, 1_000
#: ``klrl evaluate --seed``: of the fresh episodes; the sets have 0, 1, ...
FRESH_SEED = 1_000
FOLDER = Path("outputs/evaluation")


class Costs(Callback):
    """CPU seconds of a run and of its evaluations.

    Attributes:
        during, closing: CPU seconds of the evaluations.
        all: of the loop, evaluations included.
    """

    def __init__(self) -> None:
        self.during = self.closing = self.all = 0.0

    def started(self, training: Loop) -> None:
        """Count from here; evaluations are timed where the loop asks for them."""
        self._began = time.process_time()
        play = training.parts.evaluation

        def timed(starts: Any, size: Any) -> Any:
            began = time.process_time()
            result = play(starts, size)
            which = "closing" if starts == CLOSING else "during"
            setattr(self, which, getattr(self, which) + time.process_time() - began)
            return result

        training.parts.evaluation = timed

    def ended(self, training: Loop) -> None:
        """The loop is over."""
        self.all = time.process_time() - self._began

    @property
    def training(self) -> float:
        """CPU seconds without evaluations."""
        return self.all - self.during - self.closing


def train(folder: Path, name: str) -> None:
    """Run a job, unless it is finished, and keep what it cost."""
    if (folder / name / "cost.json").is_file():
        return
    print(f"{name}: trains", flush=True)
    costs = Costs()
    klrl.run(*JOBS[name], *COMMON, folder=folder / name, callbacks=[costs])
    told = {**vars(costs), "training": costs.training}
    keep(folder / name / "cost.json", {k: v for k, v in told.items() if not k.startswith("_")})


def play(folder: Path, name: str, episodes: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """``klrl evaluate`` with these seeds: from the file where they were played before."""
    path = folder / name / f"played_{episodes}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    for seed in seeds:
        if str(seed) not in known:
            print(f"{name}: {episodes} episodes, seed {seed}", flush=True)
            known[str(seed)] = klrl.load_run(folder / name).evaluate(episodes, seed=seed).row
            keep(path, known)
    return [known[str(seed)] for seed in seeds]


def keep(path: Path, data: Any) -> None:
    """Write a file in one step."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)


# ---------------------------------------------------------------------------------------- tables


def closing_table(folder: Path) -> Iterator[Sequence[str]]:
    """The closing mean beside 1,000 fresh episodes, and the difference in standard errors."""
    yield "job", "closing, 100 episodes", "1,000 fresh", "difference / its standard error"
    for name in MAIN:
        last = klrl.load_run(folder / name).rows[-1]
        (fresh,) = play(folder, name, FRESH, [FRESH_SEED])
        yield name, told(last), told(fresh), f"{difference(last, fresh):+.2f}"


def difference(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """(mean a - mean b) / sqrt(se_a^2 + se_b^2)."""
    error = hypot(a["eval/return_se"], b["eval/return_se"])
    return (a["eval/return"] - b["eval/return"]) / error


def told(row: Mapping[str, float]) -> str:
    return f"{row['eval/return']:.1f} +- {row['eval/return_se']:.1f}"


def error_table(folder: Path) -> Iterator[Sequence[str]]:
    """The spread of the means of disjoint sets beside the standard error that they state."""
    yield "policy", f"sd of {SETS} means", "stated, median [range]", "stated / sd"
    for name in REPEATED:
        rows = play(folder, name, EPISODES, range(SETS))
        spread = stdev(row["eval/return"] for row in rows)
        stated = [row["eval/return_se"] for row in rows]
        span = f"{median(stated):.3g} [{min(stated):.3g}, {max(stated):.3g}]"
        yield name, f"{spread:.3g}", span, f"{median(stated) / spread:.2f}"


def cost_table(folder: Path) -> Iterator[Sequence[str]]:
    """CPU seconds of evaluations in % of the training's."""
    yield "job", "training, CPU s", "evaluations", "during the run", "at the end"
    for names in (MAIN, *((name,) for name in JOBS if name not in MAIN)):
        costs = [json.loads((folder / name / "cost.json").read_text()) for name in names]
        run = klrl.load_run(folder / names[0])
        during = [row for row in run.rows if "eval/return" in row][:-1]
        plays = f"{len(during) + 1} x {during[0]['eval/episodes']:.0f}"
        shares = [
            f"{100 * mean(cost[which] / cost['training'] for cost in costs):.1f} %"
            for which in ("during", "closing")
        ]
        seconds = f"{mean(cost['training'] for cost in costs):.0f}"
        episode = domain_of(run.config).episode
        yield names[0].partition("_0")[0], seconds, f"{plays} {episode}s", *shares


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default {FOLDER}")
    parser.add_argument("--tables", action="store_true", help="of what is finished; trains nothing")
    args = parser.parse_args()
    if not args.tables:
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in JOBS:
            train(args.folder, name)
    for rows in (cost_table, closing_table, error_table):
        header, *lines = rows(args.folder)
        print(table(header, lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
