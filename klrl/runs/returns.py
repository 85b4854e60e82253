"""Computes and formats the returns and KLs that a run's rows contain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from klrl.base.digits import mean_and_error, number

if TYPE_CHECKING:
    from klrl.domains import Domain
    from klrl.runs.metrics import Row

#: A run's return is the first of these metrics that it recorded.
_RETURNS = ("eval/return", "reward/episode", "reward/raw")


def last_recorded(rows: Iterable[Row]) -> Row:
    """Return the last value of each metric."""
    return {name: value for row in rows for name, value in row.items()}


def final_return(last: Mapping[str, float]) -> float | None:
    """Choose the final return from the last value of each metric; None if there is no return.

    The evaluation's return comes first, then the return of training episodes, then the mean reward.
    In imitation, only the evaluation's return counts: the training episodes are demonstrations.
    """
    names = _RETURNS[:1] if "nll/held_out" in last else _RETURNS
    return next((float(last[name]) for name in names if name in last), None)


#: The smallest :func:`penalty_share` that a run's summary reports. With kl.coef=0.1, it was .22 and
#: .41 on two binary-reward tasks, where runs learned too little; .01 on pendulum and cartpole.
LARGE_SHARE = 0.15


def penalty_share(rows: Sequence[Row]) -> float:
    """Compute sum(kl.coef * KL) / sum(|mean reward|) over all rollouts; 0 without rewards."""
    kls = [row.get("div/ref/charged", row.get("kl/ref/exact", 0.0)) for row in rows]
    charged = sum(row.get("kl/ref/coef", 0.0) * kl for row, kl in zip(rows, kls, strict=True))
    rewards = sum(abs(row.get("reward/raw", 0.0)) for row in rows)
    return charged / rewards if rewards else 0.0


def evaluation_text(row: Row, domain: Domain, how: str, seconds: float | None = None) -> str:
    """Describe an evaluation's score in words; ``how``: how actions were chosen, e.g. greedily."""
    cut = int(row.get("eval/cut", 0))
    if "eval/return" not in row:
        why = f"none of {cut} {domain.episode}s ended ({how})"
        limit = "env.wrappers=[{target: TimeLimit, args: {max_episode_steps: 1000}}]"
        return f"no {domain.score}: {why}; episodes that never end need a limit: '{limit}'"
    count, over = (
        int(row.get("eval/episodes", 0)),
        "standard error over " * ("eval/return_se" in row),
    )
    played = [f"{over}{count} {domain.episode}{'s' * (count != 1)}", how]
    if cut:
        played.append(f"{cut} more did not end and {'does' if cut == 1 else 'do'} not count")
    if seconds is not None:
        played.append(f"{seconds:.1f} s")
    gold = f", gold {number(row['eval/gold'], domain.digits)}" if "eval/gold" in row else ""
    return f"{domain.score} {with_error(row, 'eval/return', domain)}{gold} ({', '.join(played)})"


def kl_lines(row: Row, domain: Domain) -> list[str]:
    """Format an evaluation's KLs of policy and reference in one line; [] without KLs."""
    if "eval/kl_ref" not in row:
        return []
    both, forward = (with_error(row, f"eval/kl_ref{way}", domain, 3) for way in ("", "_forward"))
    kls = f"KL(policy||reference) {both}, KL(reference||policy) {forward}"
    return [f"{kls} nats per {domain.unit} in the states of the {domain.evaluation}"]


def with_error(row: Row, name: str, domain: Domain, digits: int | None = None) -> str:
    """Format a metric with its standard error, if recorded: ``-160.8 +- 9.1``."""
    return mean_and_error(row[name], row.get(f"{name}_se"), digits or domain.digits)
