"""Play a policy until there are enough scores, whatever its domain. Imports no torch by itself."""

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
from klrl.runs.returns import told_evaluation

Array = np.ndarray


@dataclass(frozen=True)
class Starts:
    """A set of start states (language: prompts), the same for every run of a task.

    Two sets share no start state (a seed in 2^31 by chance).
    """

    use: str
    seed: int = 0

    def seeds(self, count: int) -> list[int]:
        """What the environment is reset with for each episode."""
        return [derived_seed(self.seed, self.use, index) for index in range(count)]


#: ``best`` is chosen from these ...
IN_RUN = Starts("in-run")
#: ... and reported from these.
CLOSING = Starts("closing")


class Scores(NamedTuple):
    """Of some episodes (responses): the score of each, and the gold score where there is one."""

    returns: list[float]
    gold: Sequence[float] = ()
    cut: int = 0  # episodes that did not end, and do not count
    #: Of each episode, ended or not: one of :data:`REFERENCE_KLS` -> [T], in each of its states.
    kls: Sequence[Mapping[str, Array]] = ()


#: What is measured of policy and reference: KL(policy||reference), KL(reference||policy) ...
REFERENCE_KLS = ("reverse", "forward")
#: ... and its metric.
_METRICS = {"reverse": "eval/kl_ref", "forward": "eval/kl_ref_forward"}


def mean_over_states(values: Sequence[Array]) -> tuple[float, float | None]:
    """Mean of values in the states of each episode [T], and its standard error over episodes.

    It is a ratio, of sums over episodes S_i to their steps T_i; its error is that of the residuals
    S_i - mean T_i. None for one episode.

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
    """What a policy scored."""

    returns: list[float]  # unshaped, in the order of the start states
    domain: Domain
    how: str  # deterministic, greedy, or sampled at a temperature
    gold: Sequence[float] = ()  # where it is not the reward
    cut: int = 0  # episodes that did not end, and do not count
    kls: Sequence[Mapping[str, Array]] = ()  # to the reference, see :class:`Scores`

    @property
    def mean(self) -> float:
        """Mean return; a ValueError where no episode ended."""
        if not self.returns:
            raise ValueError(self.line)
        return statistics.fmean(self.returns)

    @property
    def std(self) -> float:
        """Standard deviation over the episodes, n below; 0 for one."""
        return statistics.pstdev(self.returns)

    @property
    def error(self) -> float | None:
        """Standard error of the mean: s / sqrt(n), with n - 1 below s; None for one episode."""
        count = len(self.returns)
        return statistics.stdev(self.returns) / sqrt(count) if count > 1 else None

    @property
    def row(self) -> Row:
        """``eval/return`` and its kin; without a return where no episode ended."""
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
        """For a person to read."""
        return told_evaluation(self.row, self.domain, self.how)


def evaluation(scores: Iterable[Scores], domain: Domain, how: str, starts: Starts) -> Evaluation:
    """Take scores from a domain until it has no more; training's generators stay as they were."""
    returns: list[float] = []
    gold: list[float] = []
    kls: list[Mapping[str, Array]] = []
    cut = 0
    with generators_kept():
        seed_generators(derived_seed(starts.seed, starts.use))
        for few in scores:
            returns += few.returns
            gold += few.gold
            cut += few.cut
            kls += few.kls
    return Evaluation(returns, domain, how, gold, cut, kls)
