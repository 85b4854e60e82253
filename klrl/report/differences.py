"""Compares settings, groups of runs that differ only in their seed; finds the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from klrl.domains import LANGUAGE
from klrl.report.measures import Line, line_value
from klrl.report.runs import ReadRun
from klrl.report.statistics import (
    ENOUGH,
    LEVEL,
    Array,
    Contrast,
    Weighted,
    chance_of_more,
    holm,
    log_ratios,
    welch_all,
)

#: With at most this many settings, a table shows every pair; else only pairs with the best setting.
ALL_PAIRS = 4


@dataclass(frozen=True)
class Difference:
    """Mean of setting a minus mean of setting b; in :class:`OverTasks`, their mean log ratio."""

    a: int
    b: int
    value: float
    low: float
    high: float
    p: float  # two-sided, adjusted by Holm's method over all pairs
    more: float  # probability that a run of a has a higher value than a run of b; ties count half
    least: float  # the smallest true difference that the test detects with probability POWER
    paired: bool = False  # True if the test pairs the runs of each seed; see shares_starts

    @property
    def significant(self) -> bool:
        """True if the adjusted p is below 5 %."""
        return self.p < 1 - LEVEL

    def turned(self) -> Difference:
        """Return b minus a."""
        value, low, high, more = -self.value, -self.high, -self.low, 1 - self.more
        return replace(self, a=self.b, b=self.a, value=value, low=low, high=high, more=more)


def differences_of(lines: Sequence[Line], key: str = "return") -> list[Difference]:
    """Compare the measure ``key`` of all pairs of settings with at least :data:`ENOUGH` seeds.

    p is adjusted over all pairs, even if a table shows only the pairs with the best setting: to
    find the best setting, all were compared.
    """
    pairs: list[Pair] = []
    sums: list[Weighted] = []
    for a, b in combinations(range(len(lines)), 2):
        of_a, of_b = lines[a].seeds(key), lines[b].seeds(key)
        if min(len(of_a), len(of_b)) < ENOUGH:
            continue
        whole = len(of_a) == len(of_b) == len(lines[a].setting.runs)
        paired = whole and shares_starts(lines[a], lines[b])
        sums.append(([of_a - of_b], [1.0]) if paired else ([of_a, of_b], [1.0, -1.0]))
        pairs.append((a, b, chance_of_more(of_a, of_b), paired))
    return _adjusted(pairs, welch_all(sums))


#: Indices of settings a and b; P(a > b); True if their seeds are paired.
Pair = tuple[int, int, float, bool]


def _adjusted(pairs: Sequence[Pair], contrasts: Sequence[Contrast]) -> list[Difference]:
    adjusted = holm([contrast.p for contrast in contrasts])
    return [
        Difference(a, b, c.value, c.low, c.high, p, more, c.least, paired)
        for (a, b, more, paired), c, p in zip(pairs, contrasts, adjusted, strict=True)
    ]


@dataclass(frozen=True)
class OverTasks:
    """Settings that every task has, and their log ratios of returns, averaged over tasks."""

    names: list[str]
    pairs: list[Difference]  # the mean over tasks of log(mean a / mean b)
    negative: list[str]  # "SETTING on TASK" of each mean <= 0; if any, ``pairs`` is empty


def over_tasks(tasks: Mapping[str, Sequence[Line]]) -> OverTasks:
    """Compare settings with :data:`ENOUGH` seeds in every task by ratios of mean final returns.

    Unlike differences, ratios do not depend on a task's scale of returns. All tasks weigh the same.
    """
    seeds = {
        task: {line.setting.name: line.seeds("return") for line in of} for task, of in tasks.items()
    }
    every = list(seeds.values())
    names = [n for n in every[0] if all(len(of.get(n, ())) >= ENOUGH for of in every)]
    means = {f"{n} on {task}": of[n].mean() for task, of in seeds.items() for n in names}
    negative = [of for of, mean in means.items() if mean <= 0]
    pairs: list[Pair] = []
    samples: list[tuple[list[Array], list[Array]]] = []
    for i, j in combinations(range(len(names)), 2) if not negative else ():
        a, b = ([of[names[k]] for of in every] for k in (i, j))
        more = [chance_of_more(x, y) for x, y in zip(a, b, strict=True)]
        pairs.append((i, j, sum(more) / len(more), False))
        samples.append((a, b))
    return OverTasks(names, _adjusted(pairs, log_ratios(samples)), negative)


def shares_starts(a: Line, b: Line) -> bool:
    """Return True if both settings have the same seeds, and start each from the same trained model.

    Equal seeds alone do not pair two runs: with different settings, their random draws differ.
    """
    starts = [[(run.seed, trained_start(run)) for run in line.setting.runs] for line in (a, b)]
    return starts[0] == starts[1] and all(start for _, start in starts[0])


def trained_start(run: ReadRun) -> str | None:
    """Return the name of the trained run or language model that a run starts from, if any."""
    if run.settings.get("actor.init"):
        return str(run.settings["actor.init"])
    if run.domain != LANGUAGE:
        return None
    return f"base {run.settings.get('actor.model')}"


def shown(differences: Sequence[Difference], settings: int) -> list[Difference]:
    """Select pairs for a table: all if there are few settings, else those with the best setting."""
    if settings <= ALL_PAIRS:
        return list(differences)
    beaten = {each.b if each.value > 0 else each.a for each in differences}
    return [each for each in differences if not {each.a, each.b} <= beaten]


def front(
    lines: Sequence[Line], differences: Sequence[Difference], of_kl: str = "kl_ref"
) -> list[int]:
    """Find the Pareto front of a measure against KL; return its settings' indices in order of KL.

    A setting is off the front if another has a significantly higher measure at an equal or lower
    mean KL. Settings with too few seeds for the test are off the front, too.
    """
    if not differences:
        return []
    kl = [line_value(line, of_kl) for line in lines]
    beaten = set()
    for each in differences:
        more, less = (each.a, each.b) if each.value > 0 else (each.b, each.a)
        if each.significant and kl[more] <= kl[less]:
            beaten.add(less)
    compared = {i for each in differences for i in (each.a, each.b)}
    return sorted((i for i in compared - beaten if kl[i] == kl[i]), key=lambda i: kl[i])
