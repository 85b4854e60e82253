"""What a domain adds to a line of metrics.jsonl; names and units in :mod:`klrl.runs.metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from klrl.runs.metrics import Row


@dataclass(frozen=True)
class Rewards:
    """What a domain reads off a charged rollout: means per frame (token), added up in float64."""

    raw: float
    shaped: float
    applied: float  # nats that the reward was charged with, before the coefficient; 0 for none
    own: Row = field(default_factory=dict)
