"""Result 2: kl=legacy against kl=retrieve: the same numbers, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLACK, BLUE, ORANGE, dots, learning_curve, panels
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.metrics import TIMES
from klrl.report.measures import column, final
from klrl.report.runs import Run

ENVS = {"pendulum": 100_000, "hopper": 50_000}
MODES = {"none": BLACK, "legacy": BLUE, "retrieve": ORANGE}
#: Iterations that are not timed: the first ones warm up.
WARM_UP = 3
PARITY = (
    Measure("largest", "largest difference of a recorded number", "relative", 9, "high"),
    Measure("differing", "rows that differ at all", "share", 3, "high"),
    Measure("return", "difference of the final training return", "per episode", 3, "high"),
)
COST = (
    Measure("milliseconds", "iteration", "ms, median", 1, "high"),
    Measure("more", "more than kl=none", "%", 1, "high"),
)


def _sweeps() -> list[Sweep]:
    # The modes take turns within a seed, so that a busy machine slows all of them.
    turns = ("seed=0,1,2,3,4", "kl=none,legacy,retrieve")
    return [
        Sweep(
            f"results/transforms/{env}",
            (f"env={env}", f"frames={frames}", "logger=none", "eval.every=0", *turns),
            {"env": env},
            alone=True,
        )
        for env, frames in ENVS.items()
    ]


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "env", "kl")
    parity = [
        Row({"env": env}, _parity(groups[env, "legacy"], groups[env, "retrieve"])) for env in ENVS
    ]
    cost = [
        Row({"env": env, "kl": mode}, _cost(groups[env, mode], groups[env, "none"]))
        for env in ENVS
        for mode in MODES
    ]
    _draw(folder / "transforms.png", groups, cost)
    equal = (
        "`kl=legacy` and `kl=retrieve` with k1 in the reward, seed by seed and row by row; every "
        "metric that both record, times left out. A relative difference is |a - b| / max(|a|, |b|)."
    )
    timed = (
        f"Median time of an iteration (the first {WARM_UP} left out), and how much longer it is "
        "than with `kl=none` of the same seed, which ran just before. Both modes also measure k1, "
        "k2, k3 and the exact KL of every rollout."
    )
    alt = "Returns of kl=legacy and kl=retrieve, one on top of the other, and milliseconds per mode"
    return [
        Section("The same numbers", equal, parity, PARITY, "transforms.png", alt),
        Section("What they cost", timed, cost, COST),
    ]


def _parity(one: Sequence[Run], other: Sequence[Run]) -> dict[str, np.ndarray]:
    pairs = list(zip(one, other, strict=True))
    differences = [row_differences(a, b) for a, b in pairs]
    returns = [abs(final(a, "reward/episode") - final(b, "reward/episode")) for a, b in pairs]
    return {
        "largest": np.array([d.max() for d in differences]),
        "differing": np.array([(d > 0).mean() for d in differences]),
        "return": np.array(returns),
    }


def row_differences(one: Run, other: Run) -> np.ndarray:
    """[rows]: the largest relative difference of a metric that both runs recorded."""
    assert one.rows == other.rows, "runs of different lengths"
    largest = np.zeros(one.rows)
    for metric in (one.columns.keys() & other.columns.keys()) - set(TIMES):
        a, b = column(one, metric), column(other, metric)
        assert (np.isfinite(a) == np.isfinite(b)).all(), f"{metric}: recorded in other rows"
        size = np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-12)
        largest = np.fmax(largest, np.abs(a - b) / size)
    return largest


def _cost(runs: Sequence[Run], without: Sequence[Run]) -> dict[str, np.ndarray]:
    mine, base = (
        np.array([np.median(column(run, "time/iteration")[WARM_UP:]) for run in found])
        for found in (runs, without)
    )
    values = {"milliseconds": 1000 * mine}
    return values if runs is without else {**values, "more": 100 * (mine / base - 1)}


def _draw(path: Path, groups: dict[tuple[str, ...], list[Run]], cost: Sequence[Row]) -> None:
    with panels(path, 1, 2 * len(ENVS), height=3.4) as axes:
        for i, env in enumerate(ENVS):
            returns, time = axes[0, 2 * i], axes[0, 2 * i + 1]
            for mode, style in (("legacy", "-"), ("retrieve", "--")):
                look = {"label": f"kl={mode}"}
                learning_curve(
                    returns, groups[env, mode], "reward/episode", MODES[mode], style, **look
                )
            mine = [row for row in cost if row.labels["env"] == env]
            for x, row in enumerate(mine):
                dots(time, x, row, "milliseconds", MODES[row.labels["kl"]])
            returns.set(title=env, xlabel="thousand frames", ylabel="training return")
            time.set(xlabel="kl", ylabel="ms per iteration", ylim=(0, None), xlim=(-0.5, 2.5))
            time.set_xticks(range(len(MODES)), MODES)
        axes[0, 0].legend(fontsize=8)


RESULT = Result(
    number=2,
    name="transforms",
    title="kl=legacy against kl=retrieve: the same numbers, and their cost",
    question=(
        "`kl=legacy` reads the log-prob that the policy wrote while it sampled, `kl=retrieve` "
        "computes it again. Do they train the same policy, and what does the second one cost?"
    ),
    chosen="Nothing was chosen: the presets' settings, `kl.coef=0.1`.",
    sweeps=_sweeps(),
    make=make,
)
