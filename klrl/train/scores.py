"""Statistics of an evaluation, computed from the scores of its episodes or responses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch

from klrl.base.errors import NonFiniteError
from klrl.base.seeds import derived_seed, generators_kept, seed_generators
from klrl.domains import Domain
from klrl.kl.measure import not_finite
from klrl.runs.metrics import Row
from klrl.runs.returns import evaluation_text

Array = np.ndarray


@dataclass(frozen=True)
class Starts:
    """A set of start states (language: prompts), the same for every run of a task.

    In control, a different ``use`` or ``seed`` gives different environment seeds, except by chance.
    """

    use: str
    seed: int = 0

    def seeds(self, count: int) -> list[int]:
        """Return the environment's seed for each episode."""
        return [derived_seed(self.seed, self.use, index) for index in range(count)]


#: Start states of the evaluations during a run; these evaluations choose checkpoint ``best``.
IN_RUN = Starts("in-run")
#: Start states of the evaluations at the end of a run, which are reported.
CLOSING = Starts("closing")


class Size(NamedTuple):
    """Limits of an evaluation."""

    episodes: int
    steps: int | None = None  # of all episodes together; None for no limit


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation plays, and how."""

    starts: Starts
    size: Size
    sampled: bool  # sample actions (tokens), as in training; else take the mode
    device: torch.device  # of the policy


class Scores(NamedTuple):
    """The scores of some episodes (responses), and gold scores if the reward is only a proxy."""

    returns: list[float]
    gold: Sequence[float] = ()
    cut: int = 0  # episodes that did not end, and so have no score
    #: For each episode, ended or not: the name of a divergence -> its value in each state, [T].
    kls: Sequence[Mapping[str, Array]] = ()


#: The names of KL(policy||reference) and KL(reference||policy), which evaluations measure.
REFERENCE_KLS = ("reverse", "forward")
#: Name of a KL -> its metric.
_METRICS = {"reverse": "eval/kl_ref", "forward": "eval/kl_ref_forward"}


def mean_over_states(values: Sequence[Array], name: str = "") -> tuple[float, float | None]:
    """Compute the mean of values over the states of all episodes, and its standard error.

    Episode i has T_i values with sum S_i, so the mean is m = sum_i S_i / sum_i T_i. Its standard
    error is that of the mean of S_i - m T_i, divided by the mean of T_i; None for one episode.

    Raises:
        NonFiniteError: a value is NaN or infinite; the message has ``name``.
    """
    sums, steps = np.array([[each.sum(), each.size] for each in values]).T
    if not np.isfinite(sums).all():
        raise NonFiniteError(not_finite(name or "a divergence of two policies", sums.max()))
    mean, count = float(sums.sum() / steps.sum()), len(values)
    if count < 2:
        return mean, None
    residuals = sums - mean * steps
    return mean, float(np.sqrt((residuals**2).sum() / (count - 1) / count) / steps.mean())


@dataclass(frozen=True)
class Evaluation:
    """The scores of a policy, and their statistics."""

    returns: list[float]  # sums of uncharged rewards, in the order of the start states
    domain: Domain
    how: str  # deterministic, greedy, or sampled at a temperature
    gold: Sequence[float] = ()  # gold (intended) scores, if the reward is a different function
    cut: int = 0  # episodes that did not end, and so have no score
    kls: Sequence[Mapping[str, Array]] = ()  # from the reference; see :class:`Scores`

    @property
    def mean(self) -> float:
        """Mean return; raises a ValueError if no episode ended."""
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
        """The metrics ``eval/...``, without ``eval/return`` if no episode ended."""
        row: Row = {"eval/episodes": len(self.returns)}
        if self.cut:
            row["eval/cut"] = self.cut
        for name in self.kls[0] if self.kls else ():
            metric = _METRICS[name]
            row[metric], error = mean_over_states([each[name] for each in self.kls], metric)
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
    """Collect ``scores`` with seeded random generators; restore the generators afterwards."""
    with generators_kept():
        seed_generators(derived_seed(starts.seed, starts.use))
        parts = list(scores)
    returns = [each for part in parts for each in part.returns]
    gold = [each for part in parts for each in part.gold]
    kls = [each for part in parts for each in part.kls]
    return Evaluation(returns, domain, how, gold, sum(part.cut for part in parts), kls)
