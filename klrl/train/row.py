"""Makes a line of metrics.jsonl; :mod:`klrl.runs.metrics` declares the metrics and units."""

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
    """Means per frame or token of a rollout's rewards and charged KL, computed in float64."""

    raw: float
    shaped: float
    applied: float  # KL charged to the reward, nats, without the coefficient; 0 if none
    own: Row = field(default_factory=dict)  # metrics that only control or only language has


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
    """Make the line of ``metrics.jsonl`` for an iteration of ``size`` frames or samples."""
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
