"""``optim.rate=kl_adaptive``: a learning rate that keeps KL(old||new) near a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klrl.config import OptimConfig


class KLAdaptiveRate:
    """lr / 1.5 if the KL is above 2 target, lr * 1.5 if it is in 0 .. target / 2; bounded.

    KL(old||new) is measured on a minibatch before its gradient step, in nats per step or token, and
    sets the rate of the next step. In rsl_rl's PPO it sets the rate of the same step.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config, self.lr = config, config.lr

    def update(self, kl: float) -> float:
        """The learning rate of the next gradient step."""
        c = self.config
        if kl > 2 * c.kl_target:
            self.lr = max(self.lr / 1.5, c.lr_min)
        elif 0 < kl < c.kl_target / 2:
            self.lr = min(self.lr * 1.5, c.lr_max)
        return self.lr

    def state_dict(self) -> dict[str, float]:
        """The rate, for a checkpoint."""
        return {"lr": self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's rate."""
        self.lr = float(state["lr"])
