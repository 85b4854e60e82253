"""Result 3: every estimator of KL(policy||reference) in every place that klrl accepts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, PINK, dots, panels
from benchmarks.shipped.page import Result
from benchmarks.shipped.sweeps import Labelled, Plays, by_labels
from benchmarks.shipped.tables import Row
from klrl.report.measures import final
from klrl.report.runs import ReadRun

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
SEEN = ("k1", "k2", "k3")
MARKERS = {"reward": "o", "split": "D", "loss": "s", "none": "X"}


def make(result: Result, runs: Sequence[Labelled], plays: Plays) -> list[list[Row]]:
    groups = by_labels(runs, "kl.placement", "kl.estimator")
    rows = [
        Row(
            {"kl.placement": where, "kl.estimator": which, "gradient": gradient},
            _values(groups[where, which], plays),
        )
        for (where, which), gradient in GRADIENTS.items()
    ]
    _draw(result.picture, rows)
    return [rows, rows]


def _values(runs: Sequence[ReadRun], plays: Plays) -> dict[str, np.ndarray]:
    played = [plays(run, episodes=RESPONSES, sampled=True)["eval/return"] for run in runs]
    reward = np.array(played)
    kl = np.array([final(run, "kl/ref/exact_seq") for run in runs])
    exact = np.array([final(run, "kl/ref/exact") for run in runs])
    seen = {k: np.array([final(run, f"kl/ref/{k}") for run in runs]) / exact for k in SEEN}
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
