"""The second edition, as docs/results/mujoco/protocol.md has it: runs in order, and their page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.mujoco import losses, search, swimmer
from benchmarks.mujoco.cells import ZOO, Cell, Line, Lines
from benchmarks.mujoco.curves import draw_curves
from benchmarks.mujoco.peers import AIM, LEAST
from benchmarks.mujoco.published import SOURCES, best
from benchmarks.mujoco.runs import (
    ACTION,
    CLIP,
    FOLDER,
    HELD,
    KLPEN,
    SETTINGS,
    TRPO,
    TWO,
    Known,
    title,
    values,
)
from benchmarks.shipped.tables import Measure, Row, markdown
from klrl.report.statistics import Array, log_ratios

TASKS = ("hopper", "half_cheetah", "swimmer", "walker2d", "ant")
#: Tasks whose seeds are all run before the others begin.
FIRST = 3
SEEDS, SEEDS_OF_ZOO = 10, 3
SEARCHED = (CLIP, ACTION, TRPO)
PAIRS = (
    *((setting, KLPEN, TASKS) for setting in (HELD, *SEARCHED)),
    *((setting, HELD, TASKS) for setting in SEARCHED),
)


def settings() -> dict[str, tuple[str, ...]]:
    """Setting -> words, beside the presets'; those that the search took."""
    known = search.lines()
    taken = {loss: ("kl=none", *search.chosen(loss, known)) for loss in SEARCHED}
    return {HELD: SETTINGS[HELD], **taken}


def cells() -> list[Cell]:
    """Seed by seed, the first tasks before the others, Stable-Baselines3 last."""
    words = settings()
    ours = [
        Cell(task, setting, seed, words[setting])
        for tasks in (TASKS[:FIRST], TASKS[FIRST:])
        for seed in range(SEEDS)
        for task in tasks
        for setting in words
    ]
    return ours + [Cell(task, ZOO, seed, ()) for seed in range(SEEDS_OF_ZOO) for task in TWO]


def lines(folder: Path = FOLDER) -> Lines:
    """What was run."""
    return Lines(folder / "second.jsonl")


def known(folder: Path = FOLDER) -> dict[str, dict[str, list[Line]]]:
    """Setting -> task -> its finished cells, by seed."""
    there, found = lines(folder), dict[str, dict[str, list[Line]]]()
    for cell in cells():
        line = there.get(cell)
        if line is not None:
            found.setdefault(cell.setting, {}).setdefault(cell.task, []).append(line)
    return found


def rows(measures: Sequence[Measure], folder: Path = FOLDER) -> list[Row]:
    """A row per task and setting that has a finished cell."""
    found = known(folder)
    return [
        Row(
            {"task": task, "setting": title(setting), "seeds": _seeds(tasks[task])},
            {m.key: np.array([line[m.key] for line in tasks[task]], float) for m in measures
             if tasks[task][0].get(m.key) is not None},
        )
        for task in TASKS
        for setting, tasks in found.items()
        if task in tasks
    ]  # fmt: skip


def sections(first: Known, measures: Sequence[Measure], folder: Path = FOLDER) -> list[str]:
    """What there is, and what it says once all of it is there."""
    found = known(folder)
    runs = [line for tasks in found.values() for each in tasks.values() for line in each]
    head = [
        "## Second edition",
        "Do trust regions in nats per action dimension, or TRPO's step, give a higher return? The "
        "[protocol](protocol.md) was written before the first run: settings, search, the rule for "
        "the default and its power. The search ran hopper and half_cheetah for 300,000 frames, all "
        f"settings with seed {search.SEEDS[0]} and the best two of each loss with seed "
        f"{search.SEEDS[1]} too. The score is the geometric mean of the returns on both tasks:",
        searched_told(),
    ]
    if not runs:
        return [*head, f"None of {len(cells())} runs is finished; `make results-7` continues."]
    shown = [task for task in TASKS if any(task in tasks for tasks in found.values())]
    draw_curves(folder / "second.png", found, "frames", shown, columns=len(shown))
    words = "; ".join(f"{title(each)}: `{' '.join(told)}`" for each, told in settings().items())
    cpu = sum(line["cpu"] for line in runs) / 3600
    on = Counter(line["machine"] for line in runs)
    where = ", ".join(f"{count} on {machine}" for machine, count in sorted(on.items()))
    commits = ", ".join(sorted({line["commit"][:8] for line in runs}))
    of_all = f"{len(runs)} of {len(cells())} runs are finished; `make results-7` continues."
    done = f"All {len(runs)} runs are finished." if len(runs) == len(cells()) else of_all
    return [
        *head,
        f"{done} They took {cpu:.1f} CPU hours ({where}, commit {commits}). Settings: {words}.",
        f"![Training return over frames on {len(shown)} tasks: a thin line per seed, a thick one "
        "for the mean of a setting](second.png)",
        "All runs have kl=none. The columns are explained in the first edition, below.",
        markdown(rows(measures, folder), measures),
        *swimmer.second(found),
        *_judged(first, found),
    ]


def searched_told() -> str:
    """The search's settings and scores, as a table."""
    there = search.lines()
    over = search.complete(there)
    told = ["| words | seeds | score | taken |", "| --- | --- | --- | --- |"]
    for loss, each in search.SEARCHED.items():
        for words in each:
            seeds = sum(all(map(there.get, search.cells(words, each))) for each in search.SEEDS)
            taken = "yes" if over and words == search.chosen(loss, there) else ""
            score = f"{search.score(words, there):,.0f}" if seeds else ""
            told.append(f"| `{' '.join(words)}` | {seeds} | {score} | {taken} |")
    return "\n".join(told)


def _seeds(lines: Sequence[Line]) -> str:
    """As in ``0 to 3``."""
    seeds = [int(line["name"].split()[-1]) for line in lines]
    whole = seeds == list(range(len(seeds)))
    return f"0 to {seeds[-1]}" if whole and len(seeds) > 1 else ", ".join(map(str, seeds))


def _judged(first: Known, found: Known) -> list[str]:
    """The rule, once every setting has all seeds of all tasks."""
    cells = {KLPEN: first[KLPEN], **{each: {} for each in (HELD, *SEARCHED)}, **found}
    of = {each: [values(cells, each, task) for task in TASKS] for each in cells if each != ZOO}
    if min(len(x) for setting in (HELD, *SEARCHED) for x in of[setting]) < SEEDS:
        return [
            f"The rule is applied once every setting has {SEEDS} seeds on all {len(TASKS)} tasks."
        ]
    old = [values(first, HELD, task) for task in TASKS]
    same = log_ratios([(of[HELD], old)])[0]
    ratio = f"{math.exp(same.value):.2f} [{math.exp(same.low):.2f}, {math.exp(same.high):.2f}]"
    told = f"Return of klpen_held, relative to the first edition's, over five tasks: {ratio}"
    if not same.low <= 0 <= same.high:
        return [f"**{told}: klpen runs again before the rule is applied.**"]
    scope = (
        "Other environments keep klpen, and klpen_held has the same values in all environments; "
        "neither was compared there, nor with the presets' kl.coef=0.1."
    )
    training = [losses.over_tasks(cells, *pair, "training") for pair in PAIRS]
    return [
        "klpen's runs are the five seeds of the first edition, from another processor; its "
        "settings were not searched.",
        losses.table(cells, "return", PAIRS),
        f"{told}. {shown(of)} The rule asks only that a loss of {losses.LOSS:.0%} is excluded: an "
        f"equal setting passes in about one of nine repeats. {verdict(of)} {scope}",
        "The same for the returns in training (sampled actions, last tenth), which the rule does "
        "not use:",
        "\n".join((*losses.HEAD, *training)),
        f"{aim(of)} Swimmer's gamma is .9999 here. Tables with fewer seeds have higher numbers "
        "(below).",
    ]


def shown(of: dict[str, list[Array]]) -> str:
    """Which settings are shown to return more or less than klpen."""
    over = {each: log_ratios([(of[each], of[KLPEN])])[0] for each in (HELD, *SEARCHED)}
    differ = [title(each) for each, ratio in over.items() if not ratio.low <= 0 <= ratio.high]
    names = ", ".join(differ) or "No setting"
    return f"{names} is shown to return more or less than klpen over the five tasks."


def verdict(of: dict[str, list[Array]]) -> str:
    """What takes klpen's place, and whether klpen_held's shipped values change."""

    def over(setting: str) -> float:
        return log_ratios([(of[setting], of[KLPEN])])[0].value

    ahead = [each for each in (HELD, *SEARCHED) if losses.takes_over(of[each], of[KLPEN])]
    default = "klpen stays"
    if ahead:
        best = title(max(ahead, key=over))
        default = f"{best} takes klpen's place in the presets of these {len(TASKS)} tasks"
    ships = "change to" if losses.takes_over(of[ACTION], of[HELD]) else "do not change to"
    return f"**Default: {default}. klpen_held's shipped values {ships} those per action.**"


def aim(of: dict[str, list[Array]]) -> str:
    """Each setting's means over the best published PPO of LEAST seeds or more, task by task."""
    several = [each for each in SOURCES if (each.seeds or 0) >= LEAST and not each.approximate]
    numbers = [best(task, several)[0] for task in TASKS]
    told = []
    for setting in (HELD, *SEARCHED):
        ratios = [x.mean() / number for x, number in zip(of[setting], numbers, strict=True)]
        each = ", ".join(f"{t} {r:.2f}" for t, r in zip(TASKS, ratios, strict=True))
        told.append(f"{title(setting)} {each} ({'reached' if min(ratios) >= AIM else 'missed'})")
    return (
        f"Aim: {AIM} of the best published PPO of {LEAST} seeds or more, on every task. Mean "
        f"return over it: {'; '.join(told)}."
    )
