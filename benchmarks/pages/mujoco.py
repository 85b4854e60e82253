"""MuJoCo at a million frames: result 7, from second.jsonl, klpen.jsonl and search_2.jsonl."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages.tables import Measure, Row, markdown
from benchmarks.results import table
from klrl.report.statistics import Array, chance_of_more, welch

TASKS = ("hopper", "half_cheetah", "swimmer", "walker2d", "ant")
HELD, CLIP, ACTION, TRPO, KLPEN, ZOO = SETTINGS = (
    *("klpen_held", "clip", "klpen_action", "trpo", "klpen", "sb3_zoo"),
)
SEARCHED = (CLIP, ACTION, TRPO)
#: The third edition's: klpen of trpo's size; and, on hopper, sizes that are nearer to each other.
SAME_SIZE, HELD_SMALL, TRPO_SMALL = THIRD = (
    *("klpen_per_action", "klpen_held_per_action", "trpo_small"),
)
#: What a table calls them, where it is not their name.
TITLES = {
    ACTION: "klpen_held per action",
    ZOO: "Stable-Baselines3, its zoo's settings",
    SAME_SIZE: "klpen .01 per action",
    HELD_SMALL: "klpen_held .0035 per action",
    TRPO_SMALL: "trpo .005 per action",
}
#: A run on hopper that ends at or below this return fell early: the protocol's.
FALLEN = 1_500
PAIRS = (
    *((setting, KLPEN) for setting in (HELD, *SEARCHED)),
    *((setting, HELD) for setting in SEARCHED),
)
#: Share that a new default may not lose.
LOSS = 0.05
#: Preset, as in ``env=hopper`` -> Gymnasium's name without its version, in published.csv's order.
NAMES = {
    "half_cheetah": "HalfCheetah",
    "hopper": "Hopper",
    "walker2d": "Walker2d",
    "ant": "Ant",
    "swimmer": "Swimmer",
    "reacher": "Reacher",
    "inverted_pendulum": "InvertedPendulum",
    "inverted_double_pendulum": "InvertedDoublePendulum",
    "humanoid": "Humanoid",
}
Line = Mapping[str, Any]
#: Setting -> task -> its runs, by seed.
Known = Mapping[str, Mapping[str, Sequence[Line]]]


def read_lines(path: Path) -> list[Line]:
    """Read the cells of a file, a JSON object per line."""
    return list(map(json.loads, path.read_text("utf-8").splitlines()))


def read_cells(folder: Path) -> Known:
    """Read the cells of the second and third edition, and klpen's of the first."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in (
        x for name in ("second", "klpen", "third") for x in read_lines(folder / f"{name}.jsonl")
    ):
        task, setting, _ = line["name"].split()
        found.setdefault(setting, {}).setdefault(task, []).append(line)
    for by_task in found.values():
        for lines in by_task.values():
            lines.sort(key=lambda line: int(line["name"].split()[-1]))
    return found


def values(cells: Known, setting: str, task: str, key: str = "return") -> Array:
    """Take one number per seed."""
    return np.array([line[key] for line in cells[setting].get(task, ())], float)


def tables(folder: Path, measures: Sequence[Measure]) -> dict[str, str]:
    """Make the tables of the page."""
    cells = read_cells(folder)
    training = [over_tasks(cells, *pair, "training") for pair in PAIRS]
    return {
        "search": search(read_lines(folder / "search_2.jsonl")),
        "figures": markdown(_rows(cells, measures), measures),
        "losses": table(HEAD, _compared(cells)),
        "training": table(HEAD, training),
        "third": markdown(_rows(cells, measures, THIRD), measures),
        "same size": table(HEAD, _compared(cells, [(SAME_SIZE, TRPO)])),
        "falls": falls(cells),
        "published": published(cells),
    }


def _rows(
    cells: Known, measures: Sequence[Measure], settings: Sequence[str] = (HELD, *SEARCHED, ZOO)
) -> list[Row]:
    rows = []
    for task in TASKS:
        for setting in settings:
            if lines := cells[setting].get(task):
                labels = {"task": task, "setting": TITLES.get(setting, setting)}
                of = {m.key: values(cells, setting, task, m.key) for m in measures
                      if lines[0].get(m.key) is not None}  # fmt: skip
                rows.append(Row({**labels, "seeds": f"0 to {len(lines) - 1}"}, of))
    return rows


def search(lines: Sequence[Line]) -> str:
    """Format the search: each setting's score, and which of each loss was taken."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        words, seed = " ".join(line["words"][2:]), int(line["name"].split()[-1])
        found.setdefault(words, {}).setdefault(seed, []).append(line["return"])
    scores = {words: score(list(by_seed.values())) for words, by_seed in found.items()}
    rows = []
    for loss in ("clip", "klpen_held", "trpo"):
        those = sorted(words for words in found if words.startswith(f"loss={loss} "))
        best = max((w for w in those if len(found[w]) > 1), key=lambda words: scores[words])
        rows += [
            [f"`{w}`", str(len(found[w])), f"{scores[w]:,.0f}", "yes" if w == best else ""]
            for w in those
        ]
    return table(["words", "seeds", "score", "taken"], rows)


def score(returns: Sequence[Sequence[float]]) -> float:
    """Geometric mean over the tasks of the mean return over seeds; returns [seeds][tasks]."""
    means = np.mean(returns, axis=0)
    return float(np.sqrt(np.prod(means))) if means.min() > 0 else 0.0


HEAD = (
    *("settings", "task", "difference [95 %]", "in % of the second"),
    *("P(first > second)", f"a loss of {LOSS:.0%} is excluded"),
)


def falls(cells: Known) -> str:
    """Format question B: on hopper, the ratio of the means and the runs that fell."""
    found = [values(cells, setting, "hopper") for setting in (HELD_SMALL, TRPO_SMALL)]
    counts = [(int((x <= FALLEN).sum()), len(x)) for x in found]
    told = "{:.2f} [{:.2f}, {:.2f}]".format(*map(math.exp, log_ratio(found[:1], found[1:])))
    fell = [f"{few} of {of} ({TITLES[x]})" for (few, of), x in zip(counts, THIRD[1:], strict=True)]
    heads = ("return of the first / second", f"runs at or below {FALLEN:,}", "Fisher's p")
    return table(heads, [[told, ", ".join(fell), f"{fisher(*counts):.2f}"]])


def fisher(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Compute Fisher's two-sided p of two shares, each as (number, of so many)."""
    (a, n), (b, m) = first, second

    def chance(i: int) -> float:
        return math.comb(n, i) * math.comb(m, a + b - i) / math.comb(n + m, a + b)

    known = [chance(i) for i in range(max(0, a + b - m), min(n, a + b) + 1)]
    return sum(x for x in known if x <= chance(a) * (1 + 1e-9))


def _compared(cells: Known, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[list[str]]:
    """Setting less setting, task by task and over tasks."""
    rows = []
    for first, second in pairs:
        rows += [difference(cells, first, second, task) for task in TASKS]
        rows.append(over_tasks(cells, first, second))
    return rows


def difference(cells: Known, first: str, second: str, task: str) -> list[str]:
    """Format a difference of means with Welch's interval."""
    a, b = values(cells, first, task), values(cells, second, task)
    gap, mean = welch([a, b], [1, -1]), abs(float(np.mean(b)))
    shares = (100 * each / mean for each in (gap.value, gap.low, gap.high))
    return [
        *(_names(first, second), task),
        f"{gap.value:+,.0f} [{gap.low:+,.0f}, {gap.high:+,.0f}]",
        "{:+.0f} [{:+.0f}, {:+.0f}]".format(*shares),
        f"{chance_of_more(a, b):.2f}",
        "yes" if gap.low > -LOSS * mean else "no",
    ]


def log_ratio(a: Sequence[Array], b: Sequence[Array]) -> tuple[float, float, float]:
    """Estimate the mean over tasks of log(mean a / mean b), and its interval.

    By the delta method the error of log(mean a) is that of mean a, over mean a. Percentages of b
    would have another mean, and at times another verdict, than those of a.
    """
    samples, weights = [*a, *b], [1 / len(a)] * len(a) + [-1 / len(b)] * len(b)
    value = float(np.dot(weights, [math.log(x.mean()) for x in samples]))
    around = welch([x / x.mean() for x in samples], weights)
    return value, value + around.low - around.value, value + around.high - around.value


def over_tasks(cells: Known, first: str, second: str, key: str = "return") -> list[str]:
    """Format the mean over tasks of the log ratio, told as a percentage."""
    a, b = ([values(cells, each, task, key) for task in cells[first]] for each in (first, second))
    value, low, high = (100 * math.expm1(x) for x in log_ratio(a, b))
    told = f"{value:+.0f} [{low:+.0f}, {high:+.0f}]"
    excluded = "yes" if low > -100 * LOSS else "no"
    return [_names(first, second), f"mean of {len(a)}", "", told, "", excluded]


def _names(first: str, second: str) -> str:
    return f"{TITLES.get(first, first)} - {TITLES.get(second, second)}"


def published(cells: Known) -> str:
    """Format klrl's means, and every published table of a million frames."""
    lines = []
    for setting in (HELD, TRPO):
        means = {task: values(cells, setting, task).mean() for task in TASKS}
        shown = [_short(means[task]) if task in means else "" for task in NAMES]
        lines.append([f"klrl, {setting}", "v5", "10", "one setting*", *shown])
    with Path(__file__).with_name("published.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = [row[task].partition(" +- ")[0] for task in NAMES]
            method = f", {row['method']}" * (row["method"] not in row["name"])
            address = row["address"].split(",")[0].split(" ")[0].rstrip(";")
            about = [row["versions"], row["seeds"] or "not said", row["tuning"]]
            shown = [_short(float(each)) if each else "" for each in numbers]
            lines.append([f"[{row['name']}{method}]({address})", *about, *shown])
    return table(["", "env", "seeds", "tuned", *NAMES.values()], lines)


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"
