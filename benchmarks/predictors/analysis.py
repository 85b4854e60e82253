"""R^2 of each predictor of what is forgotten, with intervals over bases; power by simulation.

Loss y of a policy: the base's return on the old task - its own. It is regressed on 1, z and z^2 by
least squares. z is the root of a KL: a difference of returns is bounded by the total variation
(Kakade and Langford 2002), and that by the root of KL / 2 (Pinsker). Other predictors are taken as
they are. RL's Razor (Shenfeld et al. 2025, arXiv:2509.04259) fits a curve of second order, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.predictors.cells import KLS, TASKS

Array = NDArray[np.float64]
PREDICTORS = {
    "new_forward": "KL(base||policy), new task",
    "new_reverse": "KL(policy||base), new task",
    "old_forward": "KL(base||policy), old task",
    "old_reverse": "KL(policy||base), old task",
    "weights": "distance of the weights",
    "new": "return on the new task",
}
ARMS = ("rl", "clone", "distill reverse", "distill forward")
#: The comparison that decides: R^2 of the first, across arms, - that of the second.
DECIDES = ("new_forward", "weights")
#: An R^2 across arms whose interval ends below this is no prediction.
ENOUGH = 0.5
BASES, RESAMPLES, LEVEL = 10, 2000, 0.95


class Points(NamedTuple):
    """Of one task: predictors and losses, [bases, settings] each."""

    settings: tuple[str, ...]
    z: dict[str, Array]
    y: Array

    def arm(self, name: str) -> Points:
        """Those of one arm."""
        kept = [i for i, setting in enumerate(self.settings) if setting.startswith(name)]
        of_arm = {key: value[:, kept] for key, value in self.z.items()}
        return Points(tuple(self.settings[i] for i in kept), of_arm, self.y[:, kept])


def points(lines: Sequence[Mapping[str, Any]]) -> Points:
    """From a task's cells."""
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


def counts_of(
    tasks: Mapping[str, Points], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Array]:
    """Of each task: its bases once each, then drawn with replacement, for all predictors alike."""
    rng, found = np.random.default_rng(seed), {}
    for task, p in tasks.items():
        n = len(p.y)
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
        found[task] = np.concatenate([np.ones((1, n)), drawn])
    return found


def interval(values: Array) -> tuple[float, float, float]:
    """The first value, and the percentile interval of the others."""
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(values[0]), float(low), float(high)


def across(
    tasks: Mapping[str, Points], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Array, Array]:
    """Mean over the tasks of the R^2 across arms of both of :data:`DECIDES`, in every resample."""
    counts = counts_of(tasks, resamples, seed)
    one, two = (np.mean([r2(p, key, counts[t]) for t, p in tasks.items()], 0) for key in DECIDES)
    return one, two


def verdict(tasks: Mapping[str, Points]) -> str:
    """What the comparison says, by the rule that was fixed before the runs."""
    one, two = across(tasks)
    value, low, high = interval(one - two)
    if len(tasks) < len(TASKS) or any(len(p.y) < BASES for p in tasks.values()):
        said = "nothing before all bases are in"
    elif high < 0 or interval(one)[2] < ENOUGH:
        said = "refuted"
    else:
        said = "supported" if low > 0 else "undecided"
    return f"R^2 {one[0]:.2f} - {two[0]:.2f} = {value:.2f} [{low:.2f}, {high:.2f}]: {said}"


def simulated(shares: tuple[float, float], rng: np.random.Generator) -> Points:
    """Losses, and the two predictors, whose R^2 is ``shares`` but for chance.

    Two thirds of the losses' variance is between settings, of the rest half between bases. What a
    predictor has beside the loss is by half its base's, so that its eight settings err together.
    """

    def spread(between: float, of_base: float, own: float) -> Array:
        level, base = rng.normal(size=(1, 8)), rng.normal(size=(BASES, 1))
        return between * level + of_base * base + own * rng.normal(size=(BASES, 8))

    y, errors = spread(1.0, 0.5, 0.5), [spread(0.0, 0.5**0.5, 0.5**0.5) for _ in DECIDES]
    pairs = zip(DECIDES, shares, errors, strict=True)
    return Points(("rl",) * 8, {k: y + y.std() * e * (1 / r - 1) ** 0.5 for k, r, e in pairs}, y)


def power(shares: tuple[float, float], tasks: int, studies: int = 400) -> tuple[float, float]:
    """Share of studies whose interval lies above 0, and below it."""
    rng, ends = np.random.default_rng(1), []
    for _ in range(studies):
        study = {str(t): simulated(shares, rng) for t in range(tasks)}
        one, two = across(study, 400, int(rng.integers(2**31)))
        ends.append(interval(one - two)[1:])
    low, high = np.array(ends).T
    return float((low > 0).mean()), float((high < 0).mean())


if __name__ == "__main__":  # the page's table
    for tasks in (1, 2, 3):
        for other in (0.7, 0.6, 0.5, 0.4):
            above, below = power((0.7, other), tasks)
            print(f"| {tasks} | .70 | {other:.2f} | {above:.0%} | {below:.0%} |")
