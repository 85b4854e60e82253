"""Result 2: kl=legacy against kl=retrieve: the same numbers, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, PINK, dots, learning_curve, panels
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import REWARDS, Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import column, final
from klrl.report.runs import Run

ENVS = {"pendulum": 100_000, "hopper": 50_000}
ENV_COLOURS = {"pendulum": GREEN, "hopper": PINK}
MODES = {"none": BLACK, "legacy": BLUE, "retrieve": ORANGE}
#: Iterations that are not timed: the first ones warm up.
WARM_UP = 3
#: Iterations before rounding has been amplified.
FIRST = 3
PARITY = (
    Measure("first", f"penalty, first {FIRST} iterations", "reward per frame", ".1e", "high"),
    Measure("all", "penalty, all iterations", "reward per frame", ".1e", "high"),
    Measure("return", "final training return", "per episode", ".2g", "high"),
)
COST = (
    Measure("milliseconds", "iteration", "ms, median", ",.1f", "high"),
    Measure("more", "more than kl=none", "%", ",.1f", "high"),
    Measure("reached", "final training return", "per episode", ",.0f"),
)


def _sweeps() -> list[Sweep]:
    # The modes take turns within a seed, so that a busy machine slows all of them.
    quiet = ("logger=none", "eval.every=0")
    turns = ("seed=0,1,2,3,4", "kl=none,legacy,retrieve")
    return [
        Sweep(
            f"results/transforms/{env}",
            (f"env={env}", *REWARDS.get(env, ()), f"frames={frames}", *quiet, *turns),
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
        "`kl=legacy` and `kl=retrieve` with k1 in the reward, seed by seed: the largest absolute "
        "difference of `kl/ref/penalty`, coef * KL, over the rows, and that of the final training "
        "return. Both compute the same numbers by two ways whose rounding differs in the last "
        "digit of a float32; an environment where small differences grow then takes the two runs "
        "apart as it would two seeds."
    )
    timed = (
        f"Median time of an iteration (the first {WARM_UP} left out), and how much longer it is "
        "than with `kl=none` of the same seed, which ran just before. Both modes also measure k1, "
        "k2, k3 and the exact KL of every rollout. `kl=none` has no penalty, and so another return."
    )
    alt = "The penalties' difference by iteration, the returns of both modes, what either costs"
    return [
        Section("The same numbers", equal, parity, PARITY, "transforms.png", alt),
        Section("What they cost", timed, cost, COST),
    ]


def _parity(one: Sequence[Run], other: Sequence[Run]) -> dict[str, np.ndarray]:
    pairs = list(zip(one, other, strict=True))
    found = [differences(a, b) for a, b in pairs]
    returns = [abs(final(a, "reward/episode") - final(b, "reward/episode")) for a, b in pairs]
    return {
        "first": np.array([d[:FIRST].max() for d in found]),
        "all": np.array([d.max() for d in found]),
        "return": np.array(returns),
    }


def differences(one: Run, other: Run) -> np.ndarray:
    """[rows]: the absolute difference of the penalty, reward per frame."""
    assert one.rows == other.rows, "runs of different lengths"
    return np.abs(column(one, "kl/ref/penalty") - column(other, "kl/ref/penalty"))


def _cost(runs: Sequence[Run], without: Sequence[Run]) -> dict[str, np.ndarray]:
    mine, base = (
        np.array([np.median(column(run, "time/iteration")[WARM_UP:]) for run in found])
        for found in (runs, without)
    )
    reached = np.array([final(run, "reward/episode") for run in runs])
    values = {"milliseconds": 1000 * mine, "reached": reached}
    return values if runs is without else {**values, "more": 100 * (mine / base - 1)}


def _draw(path: Path, groups: dict[tuple[str, ...], list[Run]], cost: Sequence[Row]) -> None:
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


RESULT = Result(
    number=2,
    name="transforms",
    title="kl=legacy against kl=retrieve: the same numbers, and their cost",
    question=(
        "`kl=legacy` reads the log-prob that the policy wrote while it sampled, `kl=retrieve` "
        "computes it again. Do they train the same policy, and what does the second one cost?"
    ),
    chosen="Nothing was chosen: the presets' settings, `kl.coef=0.1`.",
    limits=(
        "The cost is that of one kind of machine and of two environments in control; language "
        "policies are not in it. The parity is that of k1 in the reward; tests hold it for the "
        "other estimators. Once rounding has been amplified, the two modes of a seed are two runs: "
        "their returns say nothing about which mode is better."
    ),
    sweeps=_sweeps(),
    make=make,
)
