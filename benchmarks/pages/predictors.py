"""R^2 of each predictor of what is forgotten, with intervals over bases: result 4.

Loss y of a policy: the base's return on the old task - its own. It is regressed on 1, z and z^2 by
least squares. z is the root of a KL: a difference of returns is bounded by the total variation
(Kakade and Langford 2002), and that by the root of KL / 2 (Pinsker). Other predictors are taken as
they are. RL's Razor (Shenfeld et al. 2025, arXiv:2509.04259) fits a curve of second order, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pages.tables import escaped
from benchmarks.results import table
from klrl.report.statistics import ENOUGH as ENOUGH_SEEDS
from klrl.report.statistics import Array

TASKS = ("pendulum", "hopper", "half_cheetah")
#: KLs to the base in states of the new task, which the policy visits, and of the old task.
KLS = ("new_forward", "new_reverse", "old_forward", "old_reverse")
PREDICTORS = {
    "new_forward": "KL(base||policy), new task",
    "new_reverse": "KL(policy||base), new task",
    "old_forward": "KL(base||policy), old task",
    "old_reverse": "KL(policy||base), old task",
    "weights": "distance of the weights",
    "new": "return on the new task",
}
HEADS = escaped(PREDICTORS.values())
ARMS = ("rl", "clone", "distill reverse", "distill forward")
#: The comparison that decides: R^2 of the first, across arms, - that of the second.
DECIDES = ("new_forward", "weights")
#: An R^2 across arms whose interval ends below this is no prediction.
ENOUGH = 0.5
BASES, RESAMPLES, LEVEL = 10, 2000, 0.95
#: With fewer points a curve of three coefficients fits by itself.
FEW = 8
Line = Mapping[str, Any]


class Points(NamedTuple):
    """Of one task: predictors and losses, [bases, settings] each."""

    settings: tuple[str, ...]
    z: dict[str, Array]
    y: Array

    def arm(self, name: str) -> Points:
        """Take those of one arm."""
        kept = [i for i, setting in enumerate(self.settings) if setting.startswith(name)]
        of_arm = {key: value[:, kept] for key, value in self.z.items()}
        return Points(tuple(self.settings[i] for i in kept), of_arm, self.y[:, kept])


def read_cells(folder: Path) -> dict[str, list[Line]]:
    """Read a task's finished bases, by seed."""
    lines = list(map(json.loads, (folder / "cells.jsonl").read_text("utf-8").splitlines()))
    lines.sort(key=lambda line: int(line["name"].split()[-1]))
    return {task: [x for x in lines if x["name"].split()[0] == task] for task in TASKS}


def points(lines: Sequence[Line]) -> Points:
    """Take losses and predictors from a task's cells."""
    settings = tuple(name for name in lines[0]["policies"] if name not in ("base", "expert"))

    def values(key: str) -> Array:
        return np.array([[line["policies"][s][key] for s in settings] for line in lines], float)

    z = {key: np.sqrt(values(key)) if key in KLS else values(key) for key in PREDICTORS}
    old = np.array([[line["policies"]["base"]["old"]] for line in lines])
    return Points(settings, z, old - values("old"))


def r2(p: Points, key: str, counts: Array, per_arm: bool = False) -> Array:
    """R^2 of the loss on 1, z, z^2 (``per_arm``: and a constant for each arm), in every resample.

    Args:
        counts: how often each base counts, [resamples, bases].
    """
    y, z = ((x - x.mean()) / (x.std() or 1.0) for x in (p.y, p.z[key]))
    columns = [np.ones_like(z), z, z**2]
    if per_arm:
        arms = [[setting.startswith(arm) for setting in p.settings] for arm in ARMS[1:]]
        columns += [np.broadcast_to(np.array(arm, float), z.shape) for arm in arms]
    x = np.stack(columns, -1)
    gram = np.einsum("rb,bsi,bsj->rij", counts, x, x)
    moment = np.einsum("rb,bsi,bs->ri", counts, x, y)
    n, first, second = (counts @ (y**power).sum(1) for power in (0, 1, 2))
    # Not inverted: a resample of few bases may leave a column without variance.
    slope = np.einsum("rij,rj->ri", np.linalg.pinv(gram, rcond=1e-10, hermitian=True), moment)
    total: Array = np.maximum(second - first**2 / n, 1e-12)
    return (np.einsum("ri,ri->r", slope, moment) - first**2 / n) / total


def counts_of(tasks: Mapping[str, Points]) -> dict[str, Array]:
    """Of each task: its bases once each, then drawn with replacement, for all predictors alike."""
    rng, found = np.random.default_rng(0), {}
    for task, p in tasks.items():
        n = len(p.y)
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
        found[task] = np.concatenate([np.ones((1, n)), drawn])
    return found


def interval(values: Array) -> tuple[float, float, float]:
    """Return the first value, and the percentile interval of the others."""
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(values[0]), float(low), float(high)


def verdict(tasks: Mapping[str, Points]) -> str:
    """Say what the comparison says, by the rule that was fixed before the runs.

    It asked for an R^2 of :data:`ENOUGH` even where the settings' exact means have less: there, the
    word is undecided, not refuted.
    """
    counts = counts_of(tasks)
    one, two = (np.mean([r2(p, key, counts[t]) for t, p in tasks.items()], 0) for key in DECIDES)
    value, low, high = interval(one - two)
    if len(tasks) < len(TASKS) or any(len(p.y) < BASES for p in tasks.values()):
        said = "nothing before all bases are in"
    elif high >= 0 and interval(one)[2] < ENOUGH and (most := settings_explain(tasks)) < ENOUGH:
        said = "undecided: no KL could have met the threshold, as the settings' means have "
        said += f"{most:.2f}"
    elif high < 0 or interval(one)[2] < ENOUGH:
        said = "refuted"
    else:
        said = "supported" if low > 0 else "undecided"
    return f"R^2 {one[0]:.2f} - {two[0]:.2f} = {value:.2f} [{low:.2f}, {high:.2f}]: {said}"


def settings_explain(tasks: Mapping[str, Points]) -> float:
    """Return the R^2 of the loss on its mean per setting, mean over tasks."""
    return float(np.mean([p.y.mean(0).var() / p.y.var() for p in tasks.values()]))


def tables(folder: Path) -> dict[str, str]:
    """Make the tables of the page."""
    cells = read_cells(folder)
    found = {task: points(lines) for task, lines in cells.items()}
    decides = f"The comparison that decides: {verdict(found)}."
    return {"verdict": decides, "r_squared": r_squared(found), "policies": policies(cells)}


def r_squared(tasks: Mapping[str, Points]) -> str:
    """R^2 across and within arms, and what a constant for each arm adds to it, with intervals."""
    rows, counts = [], counts_of(tasks)
    for task, p in tasks.items():
        of = {"all arms": p, "+ a constant per arm": p, **{arm: p.arm(arm) for arm in ARMS}}
        for arm, some in of.items():
            values = [r2(some, k, counts[task], per_arm=arm.startswith("+")) for k in PREDICTORS]
            told = [_told(each, len(p.y)) if some.y.size >= FEW else "" for each in values]
            rows.append([task, arm, *told])
    return table(["R^2 of the loss", "arm", *HEADS], rows)


def _told(values: Array, bases: int) -> str:
    value, low, high = interval(values)
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if bases >= ENOUGH_SEEDS else "")


def policies(found: Mapping[str, Sequence[Line]]) -> str:
    """Means over the bases of what each policy reached, and of how far it went."""
    forms = {"new": ",.0f", "old": ",.0f", **dict.fromkeys(KLS, ".3f"), "weights": ".2f"}
    forms |= {"cpu": ".0f"}
    rows = []
    for task, cells in found.items():
        for name in cells[0]["policies"]:
            of = [[line["policies"][name].get(key, np.nan) for line in cells] for key in forms]
            means = [f"{np.mean(v):{f}}" for v, f in zip(of, forms.values(), strict=True)]
            rows.append([task, name, *(each.replace("nan", "") for each in means)])
    heads = ["return, new", "return, old", *HEADS[:5], "CPU-seconds"]
    return table(["mean over bases", "policy", *heads], rows)
