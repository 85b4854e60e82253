"""Result 6: how fixed, adaptive and dual coefficients hold KL(policy||reference) at one target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLACK, BLUE, ORANGE, dots, learning_curve, panels
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import column
from klrl.report.runs import Run

ENVS = {"pendulum": 200_000, "hopper": 100_000}
CONTROLLERS = {"fixed": BLACK, "adaptive": BLUE, "dual": ORANGE}
COEF, TARGET, NEAR, EPISODES = 0.3, 0.3, 0.25, 50
MEASURES = (
    Measure("ratio", "mean KL / target", "last half", ",.2f", "far"),
    Measure("near", "within 25 %", "share of iterations, last half"),
    Measure("return", "evaluation return", "per episode", ",.0f"),
)


def _sweeps() -> list[Sweep]:
    found = []
    for env, frames in ENVS.items():
        words = (
            *(f"env={env}", f"frames={frames}", f"kl.coef={COEF}"),
            *("logger=none", "eval.every=0"),
        )
        labels = {"env": env, "controller": "fixed"}
        seeds = ("seed=0,1,2,3,4",)
        fixed = Sweep(f"results/controllers/{env}_fixed", (*words, *seeds), labels)
        held = ("controller=adaptive,dual", f"controller.target={TARGET}")
        moved = (*words, *held, *seeds)
        found += [fixed, Sweep(f"results/controllers/{env}", moved, {"env": env})]
    return found


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "env", "controller")
    rows = [
        Row({"env": env, "controller": kind}, _values(groups[env, kind], plays))
        for env in ENVS
        for kind in CONTROLLERS
    ]
    _draw(folder / "controllers.png", groups, rows)
    note = (
        f"All start at `kl.coef={COEF}`; `adaptive` and `dual` have `controller.target={TARGET}` "
        "nats per frame, `fixed` has no target and stands beside it. KL(policy||reference) is the "
        f"closed form of each rollout. Evaluation: {EPISODES} deterministic episodes."
    )
    alt = "KL(policy||reference) and kl.coef over frames, for three controllers, and the target"
    return [Section("Figures", note, rows, MEASURES, "controllers.png", alt)]


def _values(runs: Sequence[Run], plays: Plays) -> dict[str, np.ndarray]:
    halves = [column(run, "kl/ref/exact")[run.rows // 2 :] / TARGET for run in runs]
    return {
        "ratio": np.array([half.mean() for half in halves]),
        "near": np.array([(np.abs(half - 1) <= NEAR).mean() for half in halves]),
        "return": np.array([plays(run, episodes=EPISODES)["eval/return"] for run in runs]),
    }


def _draw(path: Path, groups: dict[tuple[str, ...], list[Run]], rows: Sequence[Row]) -> None:
    with panels(path, len(ENVS), 3, height=3.3) as axes:
        for (kl, coef, near), env in zip(axes, ENVS, strict=True):
            kl.axhline(TARGET, color="grey", linewidth=1)
            low, high = TARGET * (1 - NEAR), TARGET * (1 + NEAR)
            kl.axhspan(low, high, color="grey", alpha=0.25, label="target +- 25 %")
            for x, (kind, colour) in enumerate(CONTROLLERS.items()):
                learning_curve(kl, groups[env, kind], "kl/ref/exact", colour, label=kind)
                learning_curve(coef, groups[env, kind], "kl/ref/coef", colour)
                row = next(
                    r for r in rows if (r.labels["env"], r.labels["controller"]) == (env, kind)
                )
                dots(near, x, row, "near", colour)
            kl.set(title=env, xlabel="thousand frames", ylabel="KL(policy||reference), nats")
            kl.set(ylim=(0, 2.5 * TARGET))
            coef.set(xlabel="thousand frames", ylabel="kl.coef, reward per nat", yscale="log")
            near.set(ylabel="share within 25 %, last half", ylim=(-0.03, 1.03))
            near.set_xticks(range(len(CONTROLLERS)), CONTROLLERS)


RESULT = Result(
    number=6,
    name="controllers",
    title="Controllers of kl.coef: how they hold KL(policy||reference)",
    question=(
        "A coefficient that stays gives whatever KL it gives. Do the two that move reach a target "
        "and stay there?"
    ),
    chosen=(
        f"The start at `kl.coef={COEF}` and the target were chosen for pendulum in an earlier "
        "measurement on seeds 0 to 2 ([kl.md](../../kl.md)), which are among those shown; for "
        "hopper nothing was chosen."
    ),
    sweeps=_sweeps(),
    make=make,
)
