"""Results that compare settings of one key by task: a row of panels per task, as the YAML says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.shipped import draw
from benchmarks.shipped.page import Result
from benchmarks.shipped.sweeps import Labelled, Plays, by_labels, closing_return, diverged
from benchmarks.shipped.tables import Row
from klrl.report.measures import WARM_UP, column, final, in_band
from klrl.report.runs import ReadRun

#: How near to its target a KL is "near".
NEAR = 0.25


def _ratios(run: ReadRun, target: float) -> np.ndarray:
    """KL(policy||reference) / target over the last half of the iterations."""
    kl = column(run, "kl/ref/exact")
    return kl[len(kl) // 2 :] / target


#: Measure -> its value of a run whose KL has a target.
MEASURED: dict[str, Callable[[ReadRun, float, Plays], float]] = {
    "in_band": lambda run, target, plays: in_band(run),
    "return": lambda run, target, plays: closing_return(run, plays),
    "closing": lambda run, target, plays: closing_return(run, plays),
    "training": lambda run, target, plays: final(run, "reward/episode"),
    "kl": lambda run, target, plays: float(column(run, "kl/old/exact")[WARM_UP:].mean()),
    "ratio": lambda run, target, plays: float(_ratios(run, target).mean()),
    "near": lambda run, target, plays: float((np.abs(_ratios(run, target) - 1) <= NEAR).mean()),
}


def make(result: Result, runs: Sequence[Labelled], plays: Plays) -> list[list[Row]]:
    given = result.given["compare"]
    groups = by_labels(runs, "env", given["key"])
    rows = {
        (env, name): Row(
            {"env": env, given.get("column", given["key"]): setting.get("told", name)},
            {
                m.key: np.array([MEASURED[m.key](r, target, plays) for r in groups[env, name]])
                for m in result.measures()
            },
        )
        for env, target in given["envs"].items()
        for name, setting in given["settings"].items()
    }
    size = (len(given["envs"]), len(given["panels"]), given.get("height", draw.HEIGHT))
    with draw.panels(result.picture, *size) as axes:
        for line, (env, target) in zip(axes, given["envs"].items(), strict=True):
            for number, (each, panel) in enumerate(zip(line, given["panels"], strict=True)):
                _frame(each, panel, target)
                for x, (name, setting) in enumerate(given["settings"].items()):
                    colour = getattr(draw, setting["colour"])
                    if "curve" in panel:
                        label = {"label": setting.get("told", name)} if number == 0 else {}
                        metric = panel["curve"]
                        draw.learning_curve(each, groups[env, name], metric, colour, **label)
                    for second, key in enumerate(panel.get("dots", ())):
                        look = {"markerfacecolor": "white"} if second else {}
                        draw.dots(each, x + 0.4 * second, rows[env, name], key, colour, **look)
                if "dots" in panel:
                    middle = 0.25 * (len(panel["dots"]) > 1)
                    places = [x + middle for x in range(len(given["settings"]))]
                    each.set_xticks(places, given["settings"])
                for name, face in panel.get("legend", {}).items():
                    each.plot([], [], "o", color="grey", markerfacecolor=face, label=name)
                each.set(**panel["set"], **({"title": env} if number == 0 else {}))
    return [list(rows.values())]


def _frame(axes: Any, panel: dict[str, Any], target: float) -> None:
    """The target as a line, and a band around it."""
    if "line" in panel:
        axes.axhline(target, color="grey", linewidth=1, **panel["line"])
    if band := panel.get("band"):
        low, high, alpha = (
            (target / band["factor"], target * band["factor"], 0.3)
            if "factor" in band
            else (target * (1 - band["share"]), target * (1 + band["share"]), 0.25)
        )
        axes.axhspan(low, high, color="grey", alpha=alpha, label=band["label"])


def more(runs: Sequence[Labelled]) -> list[str]:
    """Which runs ended early, in a sentence, where any may."""
    if "loss.beta_rule" not in runs[0].labels:
        return []
    groups = by_labels(runs, "env", "loss.beta_rule")
    counts = {key: sum(map(diverged, found)) for key, found in groups.items()}
    ended = [f"{n} run{'s' * (n > 1)} of {rule} on {env}" for (env, rule), n in counts.items() if n]
    if not ended:
        return ["All runs finished."]
    return [
        f"Ended early, with an infinite gradient: {', '.join(ended)}. Their values are those at "
        "the last checkpoint."
    ]
