"""Computes the returns of a run and of its evaluations from its rows, and reports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from klrl.base.digits import mean_and_error, number

if TYPE_CHECKING:
    from klrl.domains import Domain
    from klrl.runs.metrics import Row

#: The return of a run is the first of these metrics that the run recorded.
_RETURNS = ("eval/return", "reward/episode", "reward/raw")


def last_recorded(rows: Iterable[Row]) -> Row:
    """The last value of each metric."""
    return {name: value for row in rows for name, value in row.items()}


def final_return(last: Mapping[str, float]) -> float | None:
    """The final return, from the last value of each metric; None if no return was recorded.

    It is the evaluation's return, else that of training episodes, else the mean reward; of a run
    that imitates only the first, since the others are the data's.
    """
    names = _RETURNS[:1] if "nll/held_out" in last else _RETURNS
    return next((float(last[name]) for name in names if name in last), None)


#: A run whose penalty share is at least this reports it. With kl.coef=0.1 the share was .22 and .41
#: on tasks with rewards of 0 and 1 that learned too little, and .01 on pendulum and cartpole.
LARGE_SHARE = 0.15


def penalty_share(rows: Sequence[Row]) -> float:
    """Mean of kl.coef * KL over all rollouts, divided by that of |reward|; 0 without a reward."""
    kls = [row.get("div/ref/charged", row.get("kl/ref/exact", 0.0)) for row in rows]
    charged = sum(row.get("kl/ref/coef", 0.0) * kl for row, kl in zip(rows, kls, strict=True))
    rewards = sum(abs(row.get("reward/raw", 0.0)) for row in rows)
    return charged / rewards if rewards else 0.0


def evaluation_text(row: Row, domain: Domain, how: str, seconds: float | None = None) -> str:
    """Describe the score of an evaluation in words; ``how``: how actions are chosen, as greedy."""
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
    """A line with the KLs of policy and reference in an evaluation's states; empty without KLs."""
    if "eval/kl_ref" not in row:
        return []
    both, forward = (with_error(row, f"eval/kl_ref{way}", domain, 3) for way in ("", "_forward"))
    kls = f"KL(policy||reference) {both}, KL(reference||policy) {forward}"
    return [f"{kls} nats per {domain.unit} in the states of the {domain.evaluation}"]


def with_error(row: Row, name: str, domain: Domain, digits: int | None = None) -> str:
    """A score with its standard error, as in ``-160.8 +- 9.1``."""
    return mean_and_error(row[name], row.get(f"{name}_se"), digits or domain.digits)
