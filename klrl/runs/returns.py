"""Computes and formats the returns and KLs that a run's rows contain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from klrl.base.digits import mean_and_error, number
from klrl.runs.metrics import METRICS, Row

if TYPE_CHECKING:
    from klrl.config import JobConfig
    from klrl.domains import Domain

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


#: A summary reports a penalty above this share of the reward. With kl.coef=0.1, it was .22 and .41
#: on two binary-reward tasks, where runs learned too little; .01 on pendulum and cartpole.
_LARGE = 0.15
#: KL(policy||reference), nats per frame or token, of a policy that hardly moved, or is far away.
_NEAR, _FAR = 1e-4, 1.0


def charged(row: Row) -> float:
    """Compute kl.coef * KL of a rollout, charged to reward or loss; reward per frame or token."""
    kl = row.get("kl/ref/exact", row.get("kl/ref/k3", 0.0))
    return row.get("kl/ref/coef", 0.0) * row.get("div/ref/charged", kl)


def shown_kl(row: Row, domain: Domain) -> str:
    """Format KL(policy||reference): the evaluation's, else the exact one, else k3, so marked."""
    for name, mark in (("eval/kl_ref", ""), ("kl/ref/exact", ""), ("kl/ref/k3", " by k3")):
        if name in row:
            return METRICS[name].of(domain).show(row[name]) + mark
    return ""


def advice(rows: Sequence[Row], config: JobConfig, domain: Domain) -> list[str]:
    """Report a penalty that is large against the reward, or a policy that hardly moved."""
    rows = [row for row in rows if row["iteration"]]
    kls = [row[name] for row in rows for name in ("kl/ref/exact", "eval/kl_ref") if name in row]
    if len(kls) < 2:  # kl/ref/exact is that before the row's update
        return []
    coef, rewards = rows[-1]["kl/ref/coef"], sum(abs(row["reward/raw"]) for row in rows)
    share = sum(map(charged, rows)) / rewards if rewards else 0.0
    if share >= _LARGE and config.controller.name == "fixed" and config.advantage.reward_weight:
        told = f"the penalty is {share:.0%} of the reward (mean sizes per {domain.unit}); if the "
        why, by = ("drifts too far", 10) if max(kls[-2:]) >= _FAR else ("learns too little", 0.1)
        return [f"{told}policy {why}, set kl.coef={coef * by:.1g}"]
    if max(kls) >= _NEAR or config.reference.name in ("ema", "periodic"):
        return []
    kl = METRICS["kl/ref/exact"].of(domain)
    most = f"KL(policy||reference) at most {kl.show(max(kls))} {kl.unit}"
    remedy = f"raise optim.lr={config.optim.lr:g}" + f" or lower kl.coef={coef:g}" * (coef > 0)
    return [f"the policy hardly moved: {most}; {remedy}; do the rewards differ?"]


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
    return [f"{kls} nats per {domain.unit} in the {domain.evaluation}"]


def with_error(row: Row, name: str, domain: Domain, digits: int | None = None) -> str:
    """Format a metric with its standard error, if recorded: ``-160.8 +- 9.1``."""
    return mean_and_error(row[name], row.get(f"{name}_se"), digits or domain.digits)
