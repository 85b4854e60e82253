"""Computes differences between settings: interval, Holm's p and P(A > B); finds the front."""

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

#: Up to this many settings, every pair is shown; beyond, each setting against the best.
ALL_PAIRS = 4


@dataclass(frozen=True)
class Difference:
    """Setting a minus setting b, in one measure or, over tasks, in the log of a measure."""

    a: int
    b: int
    value: float
    low: float
    high: float
    p: float  # two-sided, after Holm over all pairs of the table
    more: float  # P(a > b)
    least: float  # the smallest true difference that a test with these seeds detects, at POWER
    paired: bool = False  # whether it pairs seeds that share a trained start

    @property
    def significant(self) -> bool:
        """Whether p < 5 %, adjusted over all pairs of the table."""
        return self.p < 1 - LEVEL

    def turned(self) -> Difference:
        """Return b minus a."""
        value, low, high, more = -self.value, -self.high, -self.low, 1 - self.more
        return replace(self, a=self.b, b=self.a, value=value, low=low, high=high, more=more)


def differences_of(lines: Sequence[Line], key: str = "return") -> list[Difference]:
    """Compare, in one measure, all pairs of a task's settings with :data:`ENOUGH` seeds.

    p is adjusted over all pairs even if only those with the best are shown, since the best was
    chosen from the same numbers.
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


#: Two settings, P(a > b), and whether their seeds are paired.
Pair = tuple[int, int, float, bool]


def _adjusted(pairs: Sequence[Pair], contrasts: Sequence[Contrast]) -> list[Difference]:
    adjusted = holm([contrast.p for contrast in contrasts])
    return [
        Difference(a, b, c.value, c.low, c.high, p, more, c.least, paired)
        for (a, b, more, paired), c, p in zip(pairs, contrasts, adjusted, strict=True)
    ]


@dataclass(frozen=True)
class OverTasks:
    """The settings that every task has, by their log ratios over tasks."""

    names: list[str]
    pairs: list[Difference]  # of log(mean a / mean b), averaged over tasks
    negative: list[str]  # "setting on task" of means that are not positive: then there are no pairs


def over_tasks(tasks: Mapping[str, Sequence[Line]]) -> OverTasks:
    """Compare final returns over tasks, of settings with :data:`ENOUGH` seeds in every task.

    A ratio needs no chosen scale per task, and all tasks weigh the same. P(A > B) is the mean over
    tasks.
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
    """Whether both have the same seeds, and the runs of each seed share a trained start.

    The same seed alone does not pair two runs: with different settings it gives different draws.
    """
    starts = [[(run.seed, trained_start(run)) for run in line.setting.runs] for line in (a, b)]
    return starts[0] == starts[1] and all(start for _, start in starts[0])


def trained_start(run: ReadRun) -> str | None:
    """Return the run, or language model, that a run starts from; None if it starts untrained."""
    if run.settings.get("actor.init"):
        return str(run.settings["actor.init"])
    if run.domain != LANGUAGE:
        return None
    return f"base {run.settings.get('actor.model')}"


def shown(differences: Sequence[Difference], settings: int) -> list[Difference]:
    """Select the differences of a table: all pairs if few, else each setting against the best."""
    if settings <= ALL_PAIRS:
        return list(differences)
    beaten = {each.b if each.value > 0 else each.a for each in differences}
    return [each for each in differences if not {each.a, each.b} <= beaten]


def front(
    lines: Sequence[Line], differences: Sequence[Difference], of_kl: str = "kl_ref"
) -> list[int]:
    """Find the front of reward against KL: the settings that no other beats, by rising KL.

    A setting is off the front if a different one has a significantly higher measure at no higher
    mean KL. Settings of too few seeds are not on the front, since they cannot be tested.
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
