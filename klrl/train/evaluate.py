"""Statistics of an evaluation in any domain, from its scores. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

from klrl.base.errors import NonFiniteError
from klrl.base.seeds import derived_seed, generators_kept, seed_generators
from klrl.domains import Domain
from klrl.runs.metrics import Row
from klrl.runs.returns import evaluation_text

Array = np.ndarray


@dataclass(frozen=True)
class Starts:
    """A set of start states (language: prompts), the same for every run of a task.

    Two sets share no start state, except by chance (seeds have 31 bits).
    """

    use: str
    seed: int = 0

    def seeds(self, count: int) -> list[int]:
        """The seeds that reset the environment, one per episode."""
        return [derived_seed(self.seed, self.use, index) for index in range(count)]


#: Start states that choose the ``best`` checkpoint.
IN_RUN = Starts("in-run")
#: Start states of the reported evaluations.
CLOSING = Starts("closing")


class Scores(NamedTuple):
    """The scores of some episodes (responses), and their gold scores if the task has any."""

    returns: list[float]
    gold: Sequence[float] = ()
    cut: int = 0  # episodes that did not end, and do not count
    #: For each episode, ended or not: divergence -> [T], its value in each state.
    kls: Sequence[Mapping[str, Array]] = ()


#: The KLs that are measured: KL(policy||reference), KL(reference||policy).
REFERENCE_KLS = ("reverse", "forward")
#: KL -> its metric.
_METRICS = {"reverse": "eval/kl_ref", "forward": "eval/kl_ref_forward"}


def mean_over_states(values: Sequence[Array]) -> tuple[float, float | None]:
    """Mean over the states of all episodes, [T] each, and its standard error over episodes.

    The mean is sum_i S_i / sum_i T_i, with sums S_i and steps T_i of the episodes; its standard
    error is that of the mean of S_i - mean T_i, divided by the mean T_i; None for one episode.

    Raises:
        NonFiniteError: a value is NaN or infinite.
    """
    sums, steps = np.array([[each.sum(), each.size] for each in values]).T
    if not np.isfinite(sums).all():
        raise NonFiniteError("a divergence of two policies is NaN or infinite in some state")
    mean, count = float(sums.sum() / steps.sum()), len(values)
    if count < 2:
        return mean, None
    residuals = sums - mean * steps
    return mean, float(np.sqrt((residuals**2).sum() / (count - 1) / count) / steps.mean())


@dataclass(frozen=True)
class Evaluation:
    """The scores of a policy, and their statistics."""

    returns: list[float]  # unshaped, in the order of the start states
    domain: Domain
    how: str  # deterministic, greedy, or sampled at a temperature
    gold: Sequence[float] = ()  # gold scores, if they are not the reward
    cut: int = 0  # episodes that did not end, and do not count
    kls: Sequence[Mapping[str, Array]] = ()  # to the reference, see :class:`Scores`

    @property
    def mean(self) -> float:
        """Mean return; a ValueError if no episode ended."""
        if not self.returns:
            raise ValueError(self.line)
        return statistics.fmean(self.returns)

    @property
    def std(self) -> float:
        """Standard deviation over the n episodes, with divisor n; 0 for one episode."""
        return statistics.pstdev(self.returns)

    @property
    def error(self) -> float | None:
        """Standard error of the mean: s / sqrt(n), where s has divisor n - 1; None if n = 1."""
        count = len(self.returns)
        return statistics.stdev(self.returns) / sqrt(count) if count > 1 else None

    @property
    def row(self) -> Row:
        """The metrics ``eval/...``; without a return if no episode ended."""
        row: Row = {"eval/episodes": len(self.returns)}
        if self.cut:
            row["eval/cut"] = self.cut
        for name in self.kls[0] if self.kls else ():
            metric = _METRICS[name]
            row[metric], error = mean_over_states([each[name] for each in self.kls])
            if error is not None:
                row[f"{metric}_se"] = error
        if not self.returns:
            return row
        row |= {"eval/return": self.mean, "eval/return_std": self.std}
        if self.error is not None:
            row["eval/return_se"] = self.error
        return {**row, "eval/gold": statistics.fmean(self.gold)} if self.gold else row

    @property
    def line(self) -> str:
        """The result as a line of text."""
        return evaluation_text(self.row, self.domain, self.how)


def evaluation(scores: Iterable[Scores], domain: Domain, how: str, starts: Starts) -> Evaluation:
    """Compute and collect scores; training's random generators are then restored."""
    with generators_kept():
        seed_generators(derived_seed(starts.seed, starts.use))
        parts = list(scores)
    returns = [each for part in parts for each in part.returns]
    gold = [each for part in parts for each in part.gold]
    kls = [each for part in parts for each in part.kls]
    return Evaluation(returns, domain, how, gold, sum(part.cut for part in parts), kls)
