"""One line of metrics.jsonl; names and units in :mod:`klrl.runs.metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from klrl.domains import Domain
from klrl.kl.charge import ReferenceKL
from klrl.runs.checkpoint import Counters
from klrl.runs.metrics import Row, require_declared


@dataclass(frozen=True)
class Rewards:
    """What a domain reads off a charged rollout: means per frame (token), added up in float64.

    Attributes:
        raw, shaped: the reward before and after the penalty.
        applied: the KL(policy||reference), or another divergence, that the reward was charged with,
            nats; 0 for none.
        own: entries of the domain's own: episodes, responses.
    """

    raw: float
    shaped: float
    applied: float
    own: Row = field(default_factory=dict)


def make_row(
    domain: Domain,
    counters: Counters,
    size: int,
    rewards: Rewards,
    kl: ReferenceKL | None,
    measured: Mapping[str, Tensor],
    learned: Row,
    seconds: float,
    phases: Mapping[str, float],
) -> Row:
    """One line of ``metrics.jsonl``.

    Args:
        domain: of the run; names the axis.
        counters: of the iteration that was just done.
        size: frames (samples) of its rollout.
        rewards: of its rollout.
        kl: KL(policy||reference) of the run, None for ``kl=none``.
        measured: that KL of the rollout by every estimator, and the divergence that is charged
            where it is another one.
        learned: what the update gave.
        seconds: what the iteration took.
        phases: what each of its phases took.
    """
    coef = 0.0 if kl is None else kl.coef
    row: Row = {
        "iteration": counters.iteration,
        domain.axis: counters.frames,
        "reward/raw": rewards.raw,
        "reward/shaped": rewards.shaped,
        **rewards.own,
        "kl/ref/coef": coef,
        "kl/ref/penalty": coef * rewards.applied,
        **{name: float(value) for name, value in measured.items()},
        **learned,
        "time/iteration": seconds,
        **{f"time/{name}": each for name, each in phases.items()},
        f"time/{domain.axis}_per_second": size / seconds,
    }
    require_declared(row)
    return row
