"""Result 3: every estimator of KL(policy||reference) in every place that klrl accepts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, PINK, dots, panels
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import final
from klrl.report.runs import Run

COEF, RESPONSES = 0.1, 2048
ESTIMATORS = {"k1": BLUE, "k2": PINK, "k3": ORANGE, "exact": GREEN, "none": BLACK}
#: (placement, estimator) -> what docs/kl.md says of its gradient.
GRADIENTS = {
    ("reward", "k1"): "exact",
    ("split", "exact"): "exact",
    **{("loss", name): "own step only" for name in ("k1", "k2", "k3", "exact")},
    **{("reward", name): "wrong" for name in ("k2", "k3", "exact")},
    ("none", "none"): "no penalty",
}
MARKERS = {"reward": "o", "split": "D", "loss": "s", "none": "X"}
MEASURES = (
    Measure("reward", "reward", "per response", ",.3f"),
    Measure("kl", "exact KL", "nats per response", ",.3f", ""),
    Measure("objective", "objective", "reward - coef KL", ",.3f"),
)
SEEN = tuple(Measure(name, f"{name} / exact", "", ",.2f", "far") for name in ("k1", "k2", "k3"))
_COMMON = ("experiment=sort_digits", "logger=none", "eval.every=0", f"kl.coef={COEF}")
_SEEDS = ("seed=0,1,2",)


def _sweeps() -> list[Sweep]:
    every = ("kl.allow_biased=true", "kl.placement=reward,loss", "kl.estimator=k1,k2,k3,exact")
    split = ("kl.placement=split", "kl.estimator=exact")
    return [
        Sweep("results/estimators/all", (*_COMMON, *every, *_SEEDS)),
        Sweep(
            "results/estimators/split",
            (*_COMMON, *split, *_SEEDS),
            {"kl.placement": "split", "kl.estimator": "exact"},
        ),
        Sweep(
            "results/estimators/none",
            (*_COMMON[:-1], "kl.coef=0", *_SEEDS),
            {"kl.placement": "none", "kl.estimator": "none"},
        ),
    ]


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "kl.placement", "kl.estimator")
    rows = [
        Row(
            {"kl.placement": where, "kl.estimator": which, "gradient": gradient},
            _values(groups[where, which], plays),
        )
        for (where, which), gradient in GRADIENTS.items()
    ]
    _draw(folder / "estimators.png", rows)
    note = (
        f"`kl.coef={COEF}` everywhere but in the last row. Reward: {RESPONSES} responses "
        "sampled to the evaluation split by the last policy. Exact KL: KL(policy||reference), "
        "summed over the vocabulary and a response, mean over the last tenth of the training. "
        "Objective: what "
        "should be maximised, reward - coef * KL per response. Gradient: what "
        "[kl.md](../../kl.md) says of it; the wrong ones need `kl.allow_biased=true`."
    )
    seen = (
        "The three sampled estimators beside the exact KL of the same rollouts, whichever was "
        "charged: mean over the last tenth of the training, relative to the exact KL. 1 is right."
    )
    alt = "Reward against the root of the exact KL per response, and the objective of each setting"
    return [
        Section("What was reached", note, rows, MEASURES, "estimators.png", alt),
        Section("What the estimators said", seen, rows, SEEN),
    ]


def _values(runs: Sequence[Run], plays: Plays) -> dict[str, np.ndarray]:
    played = [plays(run, episodes=RESPONSES, sampled=True)["eval/return"] for run in runs]
    reward = np.array(played)
    kl = np.array([final(run, "kl/ref/exact_seq") for run in runs])
    exact = np.array([final(run, "kl/ref/exact") for run in runs])
    seen = {m.key: np.array([final(run, f"kl/ref/{m.key}") for run in runs]) / exact for m in SEEN}
    return {"reward": reward, "kl": kl, "objective": reward - COEF * kl, **seen}


def _draw(path: Path, rows: Sequence[Row]) -> None:
    with panels(path, 1, 2, height=4.2) as axes:
        plane, objective = axes[0]
        for x, row in enumerate(rows):
            where, which = row.labels["kl.placement"], row.labels["kl.estimator"]
            colour = ESTIMATORS[which]
            # Hollow: the gradient is wrong.
            face = "white" if row.labels["gradient"] == "wrong" else colour
            look = {"fmt": MARKERS[where], "markerfacecolor": face}
            name = "no penalty" if where == "none" else f"{which}, {where}"
            name += " (wrong gradient)" if face == "white" else ""
            dots(objective, x, row, "objective", colour, **look)
            root = np.sqrt(np.maximum(row.values["kl"], 0))
            plane.scatter(
                root, row.values["reward"], s=16, color=colour, alpha=0.5, marker=MARKERS[where]
            )
            plane.plot(
                [np.sqrt(max(row.estimate("kl").value, 0))],
                [row.estimate("reward").value],
                MARKERS[where],
                color=colour,
                markerfacecolor=face,
                markersize=9,
                label=name,
            )
        plane.set(
            xlabel="sqrt(KL(policy||reference)), KL in nats per response",
            ylabel="reward per response",
        )
        objective.set(ylabel=f"reward - {COEF} KL, per response")
        names = [f"{r.labels['kl.estimator']}\n{r.labels['kl.placement']}" for r in rows[:-1]]
        names.append("no\npenalty")
        objective.set_xticks(range(len(rows)), names, fontsize=7)


RESULT = Result(
    number=3,
    name="estimators",
    title="Estimators and placements of KL(policy||reference)",
    question=(
        "[kl.md](../../kl.md) says which estimator has the gradient of the KL in which place. What "
        "does that come to in training a language policy at one coefficient?"
    ),
    chosen=(
        f"`kl.coef={COEF}` is the default of every job; learning rate, batch and epochs are the "
        "experiment's own, chosen earlier on seeds 100 and 101."
    ),
    limits=(
        "Three seeds do not rank rewards, nor settings that lie near each other: a difference is "
        "one only where the ranges are apart. One coefficient, one small task, responses of a few "
        "tokens: the errors of a wrong or partial gradient grow with KL and length "
        "([kl.md](../../kl.md) has them by enumeration)."
    ),
    sweeps=_sweeps(),
    make=make,
    seeds=3,
)
