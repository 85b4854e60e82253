"""Compares settings, groups of runs that differ only in their seed; finds the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from klrl.domains import LANGUAGE
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.report.statistics import (
    ENOUGH,
    LEVEL,
    Weighted,
    chance_of_more,
    holm,
    welch_all,
)


@dataclass(frozen=True)
class Difference:
    """Mean of setting a minus mean of setting b, which is no larger."""

    a: int
    b: int
    value: float
    low: float
    high: float
    p: float  # two-sided, adjusted by Holm's method over all pairs
    more: float  # probability that a run of a has a higher value than a run of b; ties count half
    paired: bool = False  # True if the test pairs the runs of each seed

    @property
    def significant(self) -> bool:
        """True if the adjusted p is below 5 %."""
        return self.p < 1 - LEVEL


def differences_of(settings: Sequence[Setting], key: str = "return") -> list[Difference]:
    """Compare the measure ``key`` of all pairs of settings with at least :data:`ENOUGH` seeds.

    The pairs of the setting with the highest mean come first.
    """
    seeds = [setting.seeds(key) for setting in settings]
    enough = [i for i in range(len(settings)) if len(seeds[i]) >= ENOUGH]
    enough.sort(key=lambda i: -settings[i].value(key))
    pairs = [(a, b, _paired(settings[a], settings[b], key)) for a, b in combinations(enough, 2)]
    sums: list[Weighted] = [
        ([seeds[a] - seeds[b]], [1.0]) if paired else ([seeds[a], seeds[b]], [1.0, -1.0])
        for a, b, paired in pairs
    ]
    contrasts = welch_all(sums)
    adjusted = holm([contrast.p for contrast in contrasts])
    return [
        Difference(a, b, c.value, c.low, c.high, p, chance_of_more(seeds[a], seeds[b]), paired)
        for (a, b, paired), c, p in zip(pairs, contrasts, adjusted, strict=True)
    ]


def _paired(a: Setting, b: Setting, key: str) -> bool:
    """Return True if every seed of both settings has a value and starts from the same model.

    Equal seeds alone do not pair two runs: with different settings, their random draws differ.
    """
    whole = all(len(setting.seeds(key)) == len(setting.runs) for setting in (a, b))
    starts = [[(run.seed, trained_start(run)) for run in setting.runs] for setting in (a, b)]
    return whole and starts[0] == starts[1] and all(start for _, start in starts[0])


def trained_start(run: ReadRun) -> str | None:
    """Return the name of the trained run or language model that a run starts from, if any."""
    base = f"base {run.settings.get('actor.model')}" if run.domain == LANGUAGE else None
    return run.settings.get("actor.init") or base


def front(settings: Sequence[Setting], differences: Sequence[Difference]) -> list[int]:
    """Find the Pareto front of a measure against KL; return its settings' indices in order of KL.

    A setting is off the front if another has a significantly higher measure at an equal or lower
    mean KL. Settings with too few seeds for the test are off the front, too.
    """
    kl = [setting.value("kl_ref") for setting in settings]
    beaten = {each.b for each in differences if each.significant and kl[each.a] <= kl[each.b]}
    compared = {i for each in differences for i in (each.a, each.b)}
    return sorted((i for i in compared - beaten if kl[i] == kl[i]), key=lambda i: kl[i])
