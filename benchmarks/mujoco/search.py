"""The search for one setting: ``python -m benchmarks.mujoco.search [SETTING ...] [--jobs 2]``.

On seeds from 100 on, which no page shows. Every setting that was tried stands here, and what it
gave in ``docs/results/mujoco/search.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.mujoco.cells import Cell, Lines, run_cells
from benchmarks.mujoco.published import NAMES
from benchmarks.results import ROOT

TASKS = ("half_cheetah", "hopper", "walker2d", "ant", "swimmer")
ALL = tuple(NAMES)
SEEDS = (100, 101, 102)
LINES = ROOT / "docs/results/mujoco/search.jsonl"

_HELD = ("kl=none", "loss=klpen_held")
_NORMAL = (*_HELD, "env.reward_scale=1", "env.normalize_reward=true")
#: Name -> words. Each changes one thing of another.
SETTINGS: dict[str, tuple[str, ...]] = {
    "preset": _HELD,
    "normal": _NORMAL,
    "normal .02": (*_NORMAL, "loss.dtarg=0.02"),
    "normal .03 to .003": (*_NORMAL, "loss.dtarg=0.03", "loss.dtarg_end=0.003"),
    # What a task may impose: Ant's contact forces are most of what it observes, Swimmer's reward is
    # far from what earns it.
    "normal no contacts": (*_NORMAL, "env.kwargs.include_cfrc_ext_in_observation=false"),
    "normal gamma .9999": (*_NORMAL, "advantage.gamma=0.9999"),
    "normal gamma .999": (*_NORMAL, "advantage.gamma=0.999"),
    "gamma .9999": (*_HELD, "env.reward_scale=1", "advantage.gamma=0.9999"),
    "normal gamma .9999 lambda .98": (
        *_NORMAL,
        "advantage.gamma=0.9999",
        "advantage.lmbda=0.98",
    ),
    "normal epochs 5": (*_NORMAL, "learner.epochs=5"),
    "normal lr .001": (*_NORMAL, "optim.lr=0.001"),
    "normal 8 x 512": (*_NORMAL, "collector.steps=512", "learner.minibatches=64"),
    "normal .02 to .005": (*_NORMAL, "loss.dtarg=0.02", "loss.dtarg_end=0.005"),
}


def cells(settings: Sequence[str], tasks: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Setting by setting, so that a stopped search knows some of them whole."""
    return [
        Cell(task, setting.replace(" ", "_"), seed, SETTINGS[setting])
        for setting in settings
        for seed in seeds
        for task in tasks
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mujoco.search", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="default: all")
    parser.add_argument("--tasks", nargs="*", choices=ALL, default=TASKS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--draw", action="store_true", help="no runs, only the table")
    args = parser.parse_args(argv)
    for name in args.settings:
        if name not in SETTINGS:
            parser.error(f"{name}: choose {', '.join(SETTINGS)}")
    names, lines = args.settings or list(SETTINGS), Lines(LINES)
    if not args.draw:
        failed = run_cells(cells(names, args.tasks, args.seeds), lines, args.jobs, curves=False)
        print("\n".join(failed))
    print(table(names, args.tasks, args.seeds, lines))


def table(names: Sequence[str], tasks: Sequence[str], seeds: Sequence[int], lines: Lines) -> str:
    """A row per setting: of each task the mean return and the seeds."""
    rows = []
    for name in names:
        row = [f"{name:24}"]
        for task in tasks:
            known = [lines.get(cell) for cell in cells([name], [task], seeds)]
            values = [line["return"] for line in known if line]
            told = " ".join(f"{value:,.0f}" for value in values)
            row.append(f"{np.mean(values):8,.0f} ({told})" if values else " " * 8 + "-")
        rows.append(" | ".join(row))
    return "\n".join([" | ".join(["setting".ljust(24), *tasks]), *rows])


if __name__ == "__main__":
    main()
