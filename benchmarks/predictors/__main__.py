"""``python -m benchmarks.predictors [TASK ...]``: run what is missing, write the page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.mujoco.cells import Line, Lines, run_cells
from benchmarks.predictors import analysis
from benchmarks.predictors.analysis import ARMS, BASES, PREDICTORS, Points
from benchmarks.predictors.cells import KLS, TASKS, BaseCell, run_cell
from benchmarks.predictors.models import prepare_models
from benchmarks.results import table
from benchmarks.shipped.draw import BLUE, GREEN, ORANGE, PINK, panels
from benchmarks.shipped.page import FOLDER, replace_measured, write_index
from klrl.report.statistics import ENOUGH

PAGE = FOLDER / "predictors"
PICTURE = PAGE / "predictors.png"
#: A bar would end a table's cell.
HEADS = [name.replace("|", r"\|") for name in PREDICTORS.values()]
FEW = 8


def cells_of(task: str) -> list[BaseCell]:
    return [BaseCell(task, "base", seed, ()) for seed in range(BASES)]


def write_page() -> None:
    """The measured part of the page, of the cells that are finished."""
    lines = Lines(PAGE / "cells.jsonl")
    found = {task: [*filter(None, map(lines.get, cells_of(task)))] for task in TASKS}
    found = {task: cells for task, cells in found.items() if cells}
    tasks = {task: analysis.points(cells) for task, cells in found.items()}
    parts = ["No results yet."]
    if tasks:
        finished = [line for cells in found.values() for line in cells]
        seconds = sum(line["cpu"] for line in finished)
        told = ", ".join(f"{task} {len(p.y)}" for task, p in tasks.items())
        parts = [
            f"Finished bases, of {BASES}: {told}; {seconds:,.0f} CPU-seconds.",
            f"The comparison that decides: {analysis.verdict(tasks)}.",
            f"![Loss on the old task against the root of the KL, by arm]({PICTURE.name})",
            r_squared(tasks),
            policies(found),
        ]
        draw(tasks)
        write_about(finished)
    replace_measured(PAGE / "README.md", "\n\n".join(parts), "")


def write_about(lines: Sequence[Line]) -> None:
    """The entry of the index."""
    about = {
        "number": 4,
        "title": "Does KL predict forgetting, and which KL?",
        "machine": {"name": ", ".join(sorted({line["machine"] for line in lines}))},
        "versions": lines[-1]["versions"],
        "runs": sum(len(line["policies"]) for line in lines),
        "seconds": round(sum(line["cpu"] for line in lines)),
    }
    (PAGE / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    write_index()


def r_squared(tasks: Mapping[str, Points]) -> str:
    """R^2 across and within arms, and what a constant for each arm adds to it, with intervals."""
    rows, counts = [], analysis.counts_of(tasks)
    for task, p in tasks.items():
        of = {"all arms": p, "+ a constant per arm": p, **{arm: p.arm(arm) for arm in ARMS}}
        for arm, some in of.items():
            values = [
                analysis.r2(some, key, counts[task], per_arm=arm.startswith("+"))
                for key in PREDICTORS
            ]
            few = some.y.size < FEW  # on which a curve of three coefficients lies by itself
            rows.append([task, arm, *("" if few else told(each, len(p.y)) for each in values)])
    return table(["R^2 of the loss", "arm", *HEADS], rows)


def told(values: np.ndarray, bases: int) -> str:
    value, low, high = analysis.interval(values)
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if bases >= ENOUGH else "")


def policies(found: Mapping[str, Sequence[Line]]) -> str:
    """Means over the bases of what each policy reached, and of how far it went."""
    forms = {
        "new": ",.0f",
        "old": ",.0f",
        **dict.fromkeys(KLS, ".3f"),
        "weights": ".2f",
        "cpu": ".0f",
    }
    rows = []
    for task, cells in found.items():
        for name in cells[0]["policies"]:
            of = [[line["policies"][name].get(key, np.nan) for line in cells] for key in forms]
            means = [f"{np.mean(v):{f}}" for v, f in zip(of, forms.values(), strict=True)]
            means = [each.replace("nan", "") for each in means]
            rows.append([task, name, *means])
    heads = ["return, new", "return, old", *HEADS[:5], "CPU-seconds"]
    return table(["mean over bases", "policy", *heads], rows)


def draw(tasks: Mapping[str, Points]) -> None:
    key = analysis.DECIDES[0]
    with panels(PICTURE, 1, len(tasks), height=4.0) as axes:
        for each, (task, p) in zip(axes[0], tasks.items(), strict=True):
            for arm, colour in zip(ARMS, (BLUE, ORANGE, GREEN, PINK), strict=True):
                look = {"s": 14, "alpha": 0.7, "linewidths": 0, "label": arm, "color": colour}
                each.scatter(p.arm(arm).z[key], p.arm(arm).y, **look)
            x = np.linspace(0, p.z[key].max(), 200)
            curve = np.polynomial.Polynomial.fit(p.z[key].ravel(), p.y.ravel(), 2)
            each.plot(x, curve(x), color="grey", linewidth=1)
            each.set_title(f"{task}: {TASKS[task].told}", fontsize=10)
            each.set_xlabel(f"root of {PREDICTORS[key]}")
        axes[0][0].set_ylabel("loss of return on the old task")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictors", description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--jobs", type=int, default=1, help="bases at a time (default 1)")
    parser.add_argument("--draw", action="store_true", help="no runs; write from what is there")
    parser.add_argument("--cell", nargs=2, metavar=("TASK", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        print(json.dumps(run_cell(BaseCell(args.cell[0], "base", int(args.cell[1]), ()))))
        return
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"{', '.join(unknown)}: choose {', '.join(TASKS)}")
    prepare_models()
    failed = []
    for task in () if args.draw else args.tasks or TASKS:
        failed += run_cells(cells_of(task), Lines(PAGE / "cells.jsonl"), args.jobs)
        write_page()
    write_page()
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
