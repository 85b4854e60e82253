"""How often the report's intervals hold the truth, and how often its test of differences is wrong.

    python -m benchmarks.coverage              # some minutes; prints the tables of docs/report.md

The coverage of log ratios is that of docs/results/mujoco.

Synthetic returns with a known mean; no training. Intervals are of nominally 95 %, levels of 5 %.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from numpy.random import Generator

from benchmarks.results import table
from klrl.report.statistics import (
    Array,
    holm,
    log_ratios,
    quantile,
    two_sided,
    welch_all,
)

Draw = Callable[[Generator, tuple[int, ...]], Array]
SEEDS = (3, 5, 10)


def bad_seeds(share: float) -> Draw:
    """Good seeds return 1 +- 0.1, a share of them 0 +- 0.1."""
    return lambda rng, shape: (rng.random(shape) >= share) + 0.1 * rng.standard_normal(shape)


def spread(cv: float) -> Draw:
    """Normal returns of mean 1."""
    return lambda rng, shape: 1 + cv * rng.standard_normal(shape)


#: Name -> how to draw, and the true mean.
RETURNS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, shape: rng.standard_normal(shape), 0.0),
    "exponential": (lambda rng, shape: rng.standard_exponential(shape), 1.0),
    "lognormal, sigma 1": (lambda rng, shape: rng.lognormal(size=shape), float(np.exp(0.5))),
    "10 % bad seeds": (bad_seeds(0.1), 0.9),
    "30 % bad seeds": (bad_seeds(0.3), 0.7),
}


def share_held(low: Array, high: Array, truth: float) -> float:
    return float(((low <= truth) & (truth <= high)).mean())


def t_interval(seeds: Array) -> tuple[Array, Array]:
    """The report's interval, of every row of [repeats, seeds]."""
    contrasts = welch_all([([row], [1.0]) for row in seeds])
    ends = np.array([(each.low, each.high) for each in contrasts])
    return ends[:, 0], ends[:, 1]


def intervals(repeats: int, rng: Generator) -> None:
    """The report's interval of a mean."""
    rows = [
        [name, *(f"{share_held(*t_interval(draw(rng, (repeats, n))), truth):.3f}" for n in SEEDS)]
        for name, (draw, truth) in RETURNS.items()
    ]
    print(table(["returns", *(f"n = {n}" for n in SEEDS)], rows))


def pooled(repeats: int, rng: Generator, settings: int = 4) -> None:
    """One spread for all settings of a table, or one for each; where they are equal or not.

    Pooling gives s^2 = mean of the settings' variances, with settings * (n - 1) degrees of freedom.
    """
    rows: list[list[str]] = []
    for name, scale in (("equal", np.ones(settings)), ("one is 4 times", np.r_[4.0, [1.0] * 3])):
        cells: dict[str, list[str]] = {"each setting's own": [], "pooled": []}
        for n in SEEDS:
            x = rng.standard_normal((repeats, settings, n)) * scale[:, None]
            mean, variance = x.mean(axis=2), x.var(axis=2, ddof=1)
            own = float(quantile(0.95, n - 1)) * np.sqrt(variance / n)
            df = settings * (n - 1)
            shared = float(quantile(0.95, df)) * np.sqrt(variance.mean(axis=1) / n)[:, None]
            for kind, reach in (("each setting's own", own), ("pooled", shared)):
                held = (np.abs(mean) <= reach).mean(axis=0)
                text = f"{held.mean():.3f}" if name == "equal" else f"{held[0]:.3f}, {held[1]:.3f}"
                cells[kind].append(text)
        rows += [[name, kind, *row] for kind, row in cells.items()]
    print(table(["spreads", "interval", *(f"n = {n}" for n in SEEDS)], rows))


#: Two settings of one mean: how to draw each. Means stay positive.
RATIOS: dict[str, tuple[Draw, Draw]] = {
    "normal, spread 0.1": (spread(0.1), spread(0.1)),
    "normal, spread 0.3": (spread(0.3), spread(0.3)),
    "normal, spreads 0.1 and 0.3": (spread(0.1), spread(0.3)),
    "exponential": (RETURNS["exponential"][0], RETURNS["exponential"][0]),
    "10 % bad seeds": (bad_seeds(0.1), bad_seeds(0.1)),
    "normal, spread 0.1; 10 % bad seeds": (spread(0.1), bad_seeds(0.1)),
}


def ratio_held(draws: tuple[Draw, Draw], shape: tuple[int, int, int], rng: Generator) -> float:
    """How often the interval of the log ratio has the truth; shape is [repeats, tasks, seeds]."""
    a, b = (draw(rng, shape) for draw in draws)
    truth = math.log(drawn_mean(draws[0]) / drawn_mean(draws[1]))
    ratios = log_ratios([(list(x), list(y)) for x, y in zip(a, b, strict=True)])
    ends = np.array([(each.low, each.high) for each in ratios])
    return share_held(ends[:, 0], ends[:, 1], truth)


def drawn_mean(draw: Draw) -> float:
    """The mean of very many."""
    return float(draw(np.random.default_rng(1), (4_000_000,)).mean())


def over_tasks(repeats: int, rng: Generator) -> None:
    """The interval of the ratio over tasks."""
    sizes = [(tasks, n) for tasks in (2, 5) for n in (5, 10)]
    rows = [
        [name, *(f"{ratio_held(draws, (repeats, *size), rng):.3f}" for size in sizes)]
        for name, draws in RATIOS.items()
    ]
    print(table(["returns of a; of b", *(f"{tasks} tasks, n = {n}" for tasks, n in sizes)], rows))


def welch_p(a: Array, b: Array) -> Array:
    """:func:`klrl.report.statistics.welch` of a - b over the last axis, of many pairs at once."""
    n = a.shape[-1]
    of_a, of_b = (x.var(axis=-1, ddof=1) / n for x in (a, b))
    df = (of_a + of_b) ** 2 * (n - 1) / (of_a**2 + of_b**2)
    return two_sided((a.mean(axis=-1) - b.mean(axis=-1)) / np.sqrt(of_a + of_b), df)


def false_alarms(seeds: Array, *, best_alone: bool = False) -> float:
    """Share of tables of equal settings in which any difference is called significant."""
    pairs = list(combinations(range(seeds.shape[1]), 2))
    a, b = np.array(pairs).T
    p = welch_p(seeds[:, a], seeds[:, b])
    alarms = 0
    for settings, row in zip(seeds, p, strict=True):
        best = int(settings.mean(axis=1).argmax())
        kept = [x for x, pair in zip(row, pairs, strict=True) if not best_alone or best in pair]
        alarms += min(holm(kept)) < 0.05
    return alarms / len(seeds)


def levels(repeats: int, rng: Generator) -> None:
    """Of tables with 2, 4 and 10 settings of one mean."""
    sizes, seeds = (2, 4, 10), (5, 10)
    kinds: Sequence[tuple[str, Draw, bool]] = [
        *((name, draw, False) for name, (draw, _) in RETURNS.items()),
        ("normal, one of 4 times the spread", wide_first, False),
        ("normal, Holm only over pairs with the best", RETURNS["normal"][0], True),
    ]
    pairs = [(k, n) for k in sizes for n in seeds]
    rows = []
    for name, draw, best in kinds:
        alarms = (false_alarms(draw(rng, (repeats, k, n)), best_alone=best) for k, n in pairs)
        rows.append([name, *(f"{each:.3f}" for each in alarms)])
    print(table(["returns", *(f"{k} settings, n = {n}" for k, n in pairs)], rows))


def wide_first(rng: Generator, shape: tuple[int, ...]) -> Array:
    """Equal means; the first setting of each table has four times the spread."""
    values = rng.standard_normal(shape)
    values[:, 0] *= 4
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=20_000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"{args.repeats} repeats; coverage of the 95 % interval of the mean\n")
    intervals(args.repeats, rng)
    print("\nOne spread for all settings of a table, or one for each (wide setting, another)\n")
    pooled(args.repeats, rng)
    few = args.repeats // 5
    print(f"\n{few} repeats; coverage of the 95 % interval of the log ratio over tasks\n")
    over_tasks(few, rng)
    tables = args.repeats // 4
    print(f"\n{tables} tables of equal settings; share with a difference called significant\n")
    levels(tables, rng)


if __name__ == "__main__":
    main()
