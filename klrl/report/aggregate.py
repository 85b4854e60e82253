"""Aggregates each setting over several tasks, with the normalisation that the user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from klrl.base.errors import ConfigError
from klrl.report.measures import Line
from klrl.report.statistics import (
    ENOUGH,
    Array,
    Contrast,
    chance_of_more,
    holm,
    iqm,
    iqm_interval,
    welch,
)

#: Task -> the returns that count as 0 and as 1.
Scale = Mapping[str, tuple[float, float]]


def parse_scale(words: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Parse the ``TASK=low:high`` words of ``--normalise``."""
    scale = {}
    for word in words:
        task, _, ends = word.rpartition("=")
        try:
            low, high = map(float, ends.split(":"))
        except ValueError:
            low = high = math.nan
        if not task or not math.isfinite(high - low) or low == high:
            raise ConfigError(f"--normalise {word}: write TASK=low:high, as Pendulum-v1=-1200:-150")
        scale[task] = (low, high)
    return scale


def check_scale(scale: Scale, tasks: Sequence[str]) -> None:
    """Refuse a normalisation that lacks a task or names an unknown task."""
    for task in tasks:
        if task not in scale:
            raise ConfigError(f"--normalise: {task} has none; add {task}=low:high")
    for task in scale:
        if task not in tasks:
            raise ConfigError(
                f"--normalise {task}: no such task here; there are {', '.join(tasks)}"
            )


@dataclass(frozen=True)
class Aggregate:
    """The scores of a setting over all tasks."""

    name: str  # of the setting, the same in every task
    scores: list[Array]  # task by task, the normalised final returns [seeds]
    mean: Contrast  # mean over tasks of means over seeds; its interval is NaN below ENOUGH seeds
    iqm: float  # interquartile mean of all runs of all tasks: tasks with more seeds weigh more
    iqm_low: float | None  # None below ENOUGH seeds, or if tasks have unequal numbers of seeds
    iqm_high: float | None

    @property
    def task_means(self) -> list[float]:
        """Task by task, the mean over seeds."""
        return [float(each.mean()) for each in self.scores]

    @property
    def seeds(self) -> int:
        """The fewest seeds of any task."""
        return min(map(len, self.scores))

    @property
    def equal_seeds(self) -> bool:
        """Whether all tasks have the same number of seeds."""
        return len({len(each) for each in self.scores}) == 1


def aggregates(tasks: Mapping[str, Sequence[Line]], scale: Scale) -> list[Aggregate]:
    """Aggregate over all tasks the settings, by name, that every task has."""
    by_name = [
        # (return - low) / (high - low) of each seed
        {line.setting.name: (line.seeds("return") - low) / (high - low) for line in lines}
        for task, lines in tasks.items()
        for low, high in [scale[task]]
    ]
    names = [name for name in by_name[0] if all(len(each.get(name, ())) for each in by_name)]
    return [_aggregate(name, [each[name] for each in by_name]) for name in names]


def _aggregate(name: str, scores: list[Array]) -> Aggregate:
    seeds = min(map(len, scores))
    weights = [1 / len(scores)] * len(scores)
    if seeds >= ENOUGH:
        mean = welch(scores, weights)
    else:
        mean = Contrast(float(np.mean([each.mean() for each in scores])), *[math.nan] * 3)
    middle = float(iqm(np.concatenate(scores)))
    if seeds < ENOUGH or len(set(map(len, scores))) > 1:
        return Aggregate(name, scores, mean, middle, None, None)
    low, high = map(float, iqm_interval(np.stack(scores, axis=1)))
    return Aggregate(name, scores, mean, middle, low, high)


@dataclass(frozen=True)
class AggregateDifference:
    """The best setting over all tasks minus a different setting."""

    name: str
    difference: Contrast  # of the means over tasks
    p: float  # after Holm over all pairs of settings
    more: float  # P(best > other), the mean over tasks


def against_best(settings: Sequence[Aggregate]) -> tuple[str, list[AggregateDifference]]:
    """Compare the setting of the highest mean with each other setting of enough seeds."""
    able = [each for each in settings if each.seeds >= ENOUGH]
    if len(able) < 2:
        return "", []
    best = max(able, key=lambda each: each.mean.value)
    pairs = list(combinations(able, 2))
    answer = []
    for pair, p in zip(pairs, holm([_difference(*pair).p for pair in pairs]), strict=True):
        others = [each for each in pair if each is not best]
        for other in others if len(others) == 1 else ():
            more = [chance_of_more(a, b) for a, b in zip(best.scores, other.scores, strict=True)]
            difference = _difference(best, other)
            answer.append(AggregateDifference(other.name, difference, p, float(np.mean(more))))
    return best.name, answer


def _difference(a: Aggregate, b: Aggregate) -> Contrast:
    """Mean over tasks of a minus that of b; Welch and Satterthwaite combine the spreads."""
    weight = 1 / len(a.scores)
    weights = [weight] * len(a.scores) + [-weight] * len(b.scores)
    return welch([*a.scores, *b.scores], weights)
