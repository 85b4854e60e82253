"""``optim.rate=kl_adaptive``: a learning rate that keeps KL(old||new) near a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klrl.config import OptimConfig


class KLAdaptiveRate:
    """KL > 2 target -> lr /= 1.5; 0 < KL < target / 2 -> lr *= 1.5; bounded.

    KL(old||new), in nats per frame or token, is measured on a minibatch before its gradient step,
    from the second step on; after an update of a single step, on the rollout.
    The next step uses the new rate; in rsl_rl's PPO the same step uses it.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config, self.lr = config, config.lr

    def update(self, kl: float) -> float:
        """Update the learning rate by a minibatch's KL; return the rate of the next step."""
        c = self.config
        if kl > 2 * c.kl_target:
            self.lr = max(self.lr / 1.5, c.lr_min)
        elif 0 < kl < c.kl_target / 2:
            self.lr = min(self.lr * 1.5, c.lr_max)
        return self.lr

    def state_dict(self) -> dict[str, float]:
        """Return the rate, for a checkpoint."""
        return {"lr": self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's rate."""
        self.lr = float(state["lr"])
