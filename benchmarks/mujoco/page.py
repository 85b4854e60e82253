"""``docs/results/mujoco/``: README.md, figures.csv, about.json and the pictures, from the cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.mujoco import losses, peers, second, swimmer
from benchmarks.mujoco.cells import END, Line
from benchmarks.mujoco.curves import draw_curves
from benchmarks.mujoco.published import NAMES
from benchmarks.mujoco.runs import (
    FOLDER,
    HELD,
    MAIN,
    SEEDS,
    SETTINGS,
    Known,
    known,
    title,
    values,
)
from benchmarks.peers.common import versions
from benchmarks.shipped.page import INTERVAL, replace_measured
from benchmarks.shipped.tables import Measure, Row, markdown, write_csv
from klrl.report.measures import BAND, WARM_UP

NUMBER = 7
TITLE = "MuJoCo at a million frames"
MEASURES = (
    Measure("return", "return", "per episode", ",.4g"),
    Measure("se", "standard error of a run's return", "likewise", ",.3g", "", bounds=(0.0, np.inf)),
    Measure("training", "return in training", "likewise", ",.4g"),
    Measure("kl_old", "KL(old||new)", "nats per frame", ".4f", ""),
    Measure("band", "in band", "share of iterations", ".3f", bounds=(0.0, 1.0)),
    Measure("band_end", "in band at the end", "likewise", ".2f", bounds=(0.0, 1.0)),
    Measure("cpu", "CPU", "seconds", ",.0f", "high"),
)


def write_page(folder: Path = FOLDER) -> None:
    """Compute, draw and write what there is."""
    cells: Known = {setting: known(setting, folder) for setting in SEEDS}
    rows = [
        Row(
            {"task": task, "setting": title(setting), "seeds": str(len(lines))},
            _values(lines),
        )
        for task in NAMES
        for setting, tasks in cells.items()
        if (lines := tasks.get(task))
    ]
    if not rows:
        raise SystemExit(f"{folder}: no run is finished")
    editions = {"first": rows, "second": second.rows(MEASURES, folder)}
    every = [
        Row({"edition": name, **row.labels}, row.values)
        for name, each in editions.items()
        for row in each
    ]
    write_csv(every, MEASURES, folder / "figures.csv")
    draw_curves(folder / "mujoco.png", cells, "frames")
    draw_curves(folder / "cpu.png", cells, "seconds")
    both = (*cells.values(), *second.known(folder).values())
    runs = [line for tasks in both for lines in tasks.values() for line in lines]
    about = {
        "number": NUMBER,
        "title": TITLE,
        "machine": {"name": ", ".join(sorted({line["machine"] for line in runs}))},
        "versions": _versions(runs, folder / "about.json"),
        "runs": len(runs),
        "seconds": round(sum(line["seconds"] for line in runs)),
        "cpu": round(sum(line["cpu"] for line in runs)),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    question = (
        "What return does one setting reach on nine tasks, with the presets' number of frames? "
        "Should the default loss change?"
    )
    text = "\n\n".join(_sections(cells, rows, about, folder))
    replace_measured(folder / "README.md", text, f"# {TITLE}\n\n{question}\n")


def _versions(runs: Sequence[Line], about: Path) -> dict[str, str]:
    """Of the packages: as the cells have them, and as told before, since the first lack them."""
    before = json.loads(about.read_text("utf-8"))["versions"] if about.exists() else versions()
    told = {}
    for name, earlier in before.items():
        found = {line["versions"][name] for line in runs if name in line.get("versions", ())}
        told[name] = " and ".join(sorted(found | set(earlier.split(" and "))))
    return told


def _values(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Measure -> one value per seed; none where the setting does not have it."""
    values = {m.key: [line.get(m.key) for line in lines] for m in MEASURES}
    return {key: np.array(each, float) for key, each in values.items() if None not in each}


def _sections(cells: Known, rows: Sequence[Row], about: Line, folder: Path) -> list[str]:
    told = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return [
        *second.sections(cells, MEASURES, folder),
        "## First edition",
        "All tasks have the same setting, with two exceptions: Swimmer has a longer horizon (gamma "
        ".9999, lambda .98), and the observations of Ant and Humanoid leave out the contact "
        "forces. The setting was searched on seeds 100 to 102 with klpen_held; "
        "[presets.md](../../presets.md) lists what was tried.",
        "### Returns",
        "![Training return over frames on nine tasks, a line per seed, for each loss, with the "
        "regulariser and for Stable-Baselines3 with CleanRL's settings](mujoco.png)",
        "Return: mean over 100 episodes of the last policy, with its likeliest actions. All runs "
        "of a task share the start states. An interval over seeds does not include the error from "
        "this choice, which is at most the standard error in the next column. Return in training: "
        "with sampled actions, over the last tenth. KL(old||new): mean over the iterations. In "
        f"band: the share of iterations after the first {WARM_UP} whose KL(old||new) is within a "
        f"factor of {BAND} of its target; at the end: the share of the last {END:.0%}. CPU: of the "
        "whole process, one thread, evaluation included. The machine ran one or more other runs at "
        "the same time, so these times are upper estimates. A setting with fewer than five seeds "
        "has its range.",
        markdown(rows, MEASURES),
        INTERVAL.format(seeds="the"),
        *_two_outcomes(cells),
        *swimmer.first(cells),
        *_ended_early(cells),
        *losses.sections(cells),
        *peers.beside_sb3(cells),
        *peers.beside_published(cells),
        "### Over CPU time",
        "![Training return over CPU seconds, on nine tasks](cpu.png)",
        "CPU seconds of training: those of the process without evaluation, distributed over the "
        "iterations in proportion to their wall-clock times. The thick line is the mean over the "
        "seeds, up to the end of the first run to finish.",
        "## How",
        f"    make results-{NUMBER}",
        "It continues from the committed cells, then writes the tables and pictures. "
        + _commands(),
        f"{about['runs']} runs, {about['cpu'] / 3600:.1f} CPU hours in all. Machine: "
        f"{about['machine']['name']}. Versions, as constraints.txt pins them: {told}.",
    ]


def _commands() -> str:
    words = {setting: " ".join(each) for setting, each in SETTINGS.items()}
    return (
        "The first edition's settings, in addition to `env=TASK seed=SEED`: "
        + "; ".join(f"`{each}`" for each in words.values())
        + "."
    )


#: Two outcomes: the gap between them is at least this part of the range.
GAP = 0.4


def _two_outcomes(cells: Known) -> list[str]:
    """Where klpen_held's seeds fall into two groups, whose mean no run reaches."""
    told = []
    for task in MAIN:
        ordered = np.sort(values(cells, HELD, task))
        gaps = np.diff(ordered)
        if not len(gaps) or gaps.max() < GAP * (ordered[-1] - ordered[0]):
            continue
        parts = np.split(ordered, [int(gaps.argmax()) + 1])
        if min(map(len, parts)) > 1:
            groups = (f"{len(p)} return {p[0]:,.0f} to {p[-1]:,.0f}" for p in parts)
            told.append(
                f"{NAMES[task]} has two outcomes, and no run is near the mean: of "
                f"klpen_held's runs, {' and '.join(groups)}."
            )
    return told


def _ended_early(cells: Known) -> list[str]:
    """Runs whose numbers became infinite."""
    names = [
        line["name"]
        for tasks in cells.values()
        for lines in tasks.values()
        for line in lines
        if "failed" in line
    ]
    if not names:
        return []
    told = ", ".join(names)
    return [f"Ended early: {told}. Their values are those at the last checkpoint."]
