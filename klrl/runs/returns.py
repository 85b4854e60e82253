"""The return of a run and of its evaluations, from the rows that it recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from klrl.base.digits import mean_and_error, number

if TYPE_CHECKING:
    from klrl.domains import Domain
    from klrl.runs.metrics import Row

#: The return of a run is the first of these that it recorded.
_RETURNS = ("eval/return", "reward/episode", "reward/raw")


def last_recorded(rows: Iterable[Row]) -> Row:
    """The last value of each metric."""
    return {name: value for row in rows for name, value in row.items()}


def final_return(last: Mapping[str, float]) -> float | None:
    """The final return, from the last value of each metric; None if none was recorded.

    It is that of the evaluation, else of the episodes of training, else the mean reward.
    """
    return next((float(last[name]) for name in _RETURNS if name in last), None)


#: From here on a run says so: where kl.coef=0.1 held tasks with rewards of 0 and 1 back it was .22
#: and .41, in pendulum and cartpole .01.
LARGE_SHARE = 0.15


def penalty_share(rows: Sequence[Row]) -> float:
    """Mean size of kl.coef * KL over that of the reward, of all rollouts; 0 without a reward."""
    kls = [row.get("div/ref/charged", row.get("kl/ref/exact", 0.0)) for row in rows]
    charged = sum(row.get("kl/ref/coef", 0.0) * kl for row, kl in zip(rows, kls, strict=True))
    rewards = sum(abs(row.get("reward/raw", 0.0)) for row in rows)
    return charged / rewards if rewards else 0.0


def told_evaluation(row: Row, domain: Domain, how: str, seconds: float | None = None) -> str:
    """What an evaluation scored, for a person to read; ``how`` it was played, as greedy."""
    cut = int(row.get("eval/cut", 0))
    if "eval/return" not in row:
        why = f"none of {cut} {domain.episode}s ended ({how})"
        limit = "env.wrappers=[{target: TimeLimit, args: {max_episode_steps: 1000}}]"
        return f"no {domain.score}: {why}; a task without ends needs a limit: '{limit}'"
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


def told_kls(row: Row, domain: Domain) -> list[str]:
    """How far the policy is from its reference in the states of an evaluation; a line, or none."""
    if "eval/kl_ref" not in row:
        return []
    both, forward = (with_error(row, f"eval/kl_ref{way}", domain, 3) for way in ("", "_forward"))
    kls = f"KL(policy||reference) {both}, KL(reference||policy) {forward}"
    return [f"{kls} nats per {domain.unit} in the states of the {domain.evaluation}"]


def with_error(row: Row, name: str, domain: Domain, digits: int | None = None) -> str:
    """A score with its standard error, as in ``-160.8 +- 9.1``."""
    return mean_and_error(row[name], row.get(f"{name}_se"), digits or domain.digits)
