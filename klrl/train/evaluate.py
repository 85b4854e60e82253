"""Play a policy until there are enough scores, whatever its domain. Imports no torch by itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.config.checks import check_device_name
from klrl.domains import Domain, domain_of
from klrl.runs.find import find_run
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row, number
from klrl.runs.other_task import config_on_task


class Scores(NamedTuple):
    """Of some episodes (responses): the score of each, and the gold score where there is one."""

    returns: list[float]
    gold: Sequence[float] = ()


@dataclass(frozen=True)
class Evaluation:
    """What a policy scored.

    Attributes:
        returns: unshaped return (reward) of each episode (response), in no order.
        domain: of the policy.
        how: how it played: deterministic, greedy, or sampled at a temperature.
        gold: the gold score of each, where it is not the reward.
    """

    returns: list[float]
    domain: Domain
    how: str
    gold: Sequence[float] = ()

    @property
    def mean(self) -> float:
        """Mean return."""
        return statistics.fmean(self.returns)

    @property
    def std(self) -> float:
        """Standard deviation over the episodes (population)."""
        return statistics.pstdev(self.returns)

    @property
    def row(self) -> Row:
        """``eval/return``, ``eval/return_std``, ``eval/gold`` where there is one."""
        row: Row = {"eval/return": self.mean, "eval/return_std": self.std}
        return {**row, "eval/gold": statistics.fmean(self.gold)} if self.gold else row

    @property
    def told(self) -> str:
        """For a person to read."""
        row, domain = self.row, self.domain
        value, std = (number(row[key], domain.digits) for key in ("eval/return", "eval/return_std"))
        gold = f", gold {number(row['eval/gold'], domain.digits)}" if "eval/gold" in row else ""
        # "sampled at temperature 1": 8 sampled responses at temperature 1.
        first, *rest = self.how.split()
        played = " ".join([first, f"{domain.episode}s", *rest])
        return f"{domain.score} {value} +- {std}{gold} over {len(self.returns)} {played}"


def evaluation(scores: Iterable[Scores], domain: Domain, how: str) -> Evaluation:
    """Take scores from a domain until it has no more.

    Args:
        scores: of a few episodes (responses) at a time, while they are played.
        domain: who plays.
        how: for :class:`Evaluation`.
    """
    returns: list[float] = []
    gold: list[float] = []
    for few in scores:
        returns += few.returns
        gold += few.gold
    return Evaluation(returns, domain, how, gold)


def evaluate_run(
    run: str | Path,
    words: Sequence[str] = (),
    *,
    episodes: int | None = None,
    sampled: bool = False,
    which: str = "last",
    seed: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """What ``klrl evaluate`` measures.

    Args:
        run: the run folder.
        words: another task, as in ``env.kwargs.g=14``; see :mod:`klrl.runs.other_task`.
        episodes: how many; None: :attr:`klrl.domains.Domain.plays`.
        sampled: language: draw responses as in training; else the likeliest tokens.
        which: last or best checkpoint.
        seed: of the episodes (samples).
        device: where to put the policy.

    Raises:
        ConfigError: no such run or checkpoint, a task that the policy cannot play, or an argument
            out of range.
        NonFiniteError: a step returned NaN or infinity.
        RewardError: the reward function failed.
    """
    check_device_name(device)
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"{name}={value}: give a whole number >= {least}")
    folder = find_run(str(run), "RUN")
    config = config_on_task(folder, words)
    domain = domain_of(config)
    return domain.evaluate(
        folder,
        config,
        episodes=episodes or domain.plays,
        sampled=sampled,
        which=which,
        seed=derived_seed(seed, "evaluate"),
        device=device_of(device),
    )
