"""Result 2: kl=legacy against kl=retrieve: the same numbers, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, PINK, dots, learning_curve, panels
from benchmarks.shipped.page import Result
from benchmarks.shipped.sweeps import Labelled, Plays, by_labels
from benchmarks.shipped.tables import Row
from klrl.report.measures import column, final
from klrl.report.runs import ReadRun

ENV_COLOURS = {"pendulum": GREEN, "hopper": PINK}
MODES = {"none": BLACK, "legacy": BLUE, "retrieve": ORANGE}
#: Iterations that are not timed: the first ones warm up.
WARM_UP = 3
#: Iterations before rounding has been amplified.
FIRST = 3


def make(result: Result, runs: Sequence[Labelled], plays: Plays) -> list[list[Row]]:
    groups = by_labels(runs, "env", "kl")
    parity = [
        Row({"env": env}, _parity(groups[env, "legacy"], groups[env, "retrieve"]))
        for env in ENV_COLOURS
    ]
    cost = [
        Row({"env": env, "kl": mode}, _cost(groups[env, mode], groups[env, "none"]))
        for env in ENV_COLOURS
        for mode in MODES
    ]
    _draw(result.picture, groups, cost)
    return [parity, cost]


def _parity(one: Sequence[ReadRun], other: Sequence[ReadRun]) -> dict[str, np.ndarray]:
    pairs = list(zip(one, other, strict=True))
    found = [differences(a, b) for a, b in pairs]
    returns = [abs(final(a, "reward/episode") - final(b, "reward/episode")) for a, b in pairs]
    return {
        "first": np.array([d[:FIRST].max() for d in found]),
        "all": np.array([d.max() for d in found]),
        "return": np.array(returns),
    }


def differences(one: ReadRun, other: ReadRun) -> np.ndarray:
    """[rows]: the absolute difference of the penalty, reward per frame."""
    assert one.rows == other.rows, "runs of different lengths"
    return np.abs(column(one, "kl/ref/penalty") - column(other, "kl/ref/penalty"))


def _cost(runs: Sequence[ReadRun], without: Sequence[ReadRun]) -> dict[str, np.ndarray]:
    mine, base = (
        np.array([np.median(column(run, "time/iteration")[WARM_UP:]) for run in found])
        for found in (runs, without)
    )
    reached = np.array([final(run, "reward/episode") for run in runs])
    values = {"milliseconds": 1000 * mine, "reached": reached}
    return values if runs is without else {**values, "more": 100 * (mine / base - 1)}


def _draw(path: Path, groups: dict[tuple[str, ...], list[ReadRun]], cost: Sequence[Row]) -> None:
    with panels(path, 1, 3) as axes:
        apart, returns, more = axes[0]
        for (env, colour), marker in zip(ENV_COLOURS.items(), "os", strict=True):
            pairs = zip(groups[env, "legacy"], groups[env, "retrieve"], strict=True)
            for i, (a, b) in enumerate(pairs):
                # 0 cannot be drawn on a logarithmic axis.
                found = np.maximum(differences(a, b), 1e-10)
                label = f"{env}, a line per seed" if i == 0 else None
                steps = range(1, len(found) + 1)
                apart.plot(steps, found, color=colour, linewidth=0.9, alpha=0.8, label=label)
            apart.set(xlabel="iteration", ylabel="|penalty difference|, reward per frame")
            rows = [row for row in cost if row.labels["env"] == env and "more" in row.values]
            for row in rows:
                x = list(MODES).index(row.labels["kl"]) - 1 + (0.3 if marker == "s" else 0)
                dots(more, x, row, "more", colour, fmt=marker)
        apart.set_yscale("log")
        for mode, style in (("legacy", "-"), ("retrieve", "--")):
            runs = groups["pendulum", mode]
            look = {"label": f"kl={mode}"}
            learning_curve(returns, runs, "reward/episode", MODES[mode], style, **look)
        returns.set(title="pendulum", xlabel="thousand frames", ylabel="training return")
        more.axhline(0, color="grey", linewidth=1)
        more.set(xlabel="kl", ylabel="iteration time, % more than kl=none")
        more.set_xticks([0.2, 1.2], ["legacy", "retrieve"])
