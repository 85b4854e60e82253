"""``collector.staleness``: rollouts that wait for their update, in control and in language."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.config import ClipConfig, JobConfig
from klrl.kl.estimators import estimate_kl, masked_mean
from klrl.runs.metrics import Row
from klrl.train.loop import Rollout

#: Name of a loss without ``loss.anchor`` -> what it does with the sampler.
_ANCHORS = {"dppo": "divides by the sampler", "custom": "may read the sampler: scored.log_mu"}


class StaleRollout(ABC):
    """Gives the rollouts that the policy of N updates ago sampled; the first, by the first policy.

    A checkpoint contains the rollouts that wait, nested tensors and numbers, oldest first.
    ``rollout``, and ``updates``, the number of updates of the policy, are set before the first one.
    """

    rollout: Rollout  # samples with the current policy
    updates, lag = 0, 0  # lag: updates since the latest rollout was sampled

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self.waiting: deque[dict[str, Any]] = deque()

    def collect(self) -> TensorDictBase:
        """Sample until N rollouts are newer than the oldest one, and return that one."""
        while len(self.waiting) <= self._staleness:
            self.waiting.append({**self.sample(), "updates": self.updates})
        oldest = self.waiting.popleft()
        self.lag = self.updates - oldest["updates"]
        self.updates += 1
        return self.recall(oldest)

    @abstractmethod
    def sample(self) -> dict[str, Any]:
        """Sample a rollout with the current policy, mu."""

    @abstractmethod
    def recall(self, oldest: Mapping[str, Any]) -> TensorDictBase:
        """Return a rollout for its update."""

    def close(self) -> None:
        """Close the collector."""
        self.rollout.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the waiting rollouts, for a checkpoint."""
        return {"waiting": [*self.waiting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's rollouts."""
        self.waiting = deque(state["waiting"])


def compare(
    kl: Tensor | None, log_mu: Tensor, old: Tensor, lag: int, mask: Tensor | None = None
) -> Row:
    """Compare mu with the policy before the update: exact, k3 and largest gap in nats; the lag.

    Any KL(mu||old), log mu and log pi_old of the samples, and any mask, have one shape.
    """
    log_mu, old = log_mu.double(), old.double()
    gap = log_mu - old if mask is None else (log_mu - old).masked_fill(~mask, 0.0)
    row = {} if kl is None else {"kl/sampler/exact": float(masked_mean(kl.double(), mask))}
    return row | {
        "kl/sampler/k3": float(masked_mean(estimate_kl(log_mu, old, "k3", mask), mask)),
        "kl/sampler/max": float(gap.abs().max()),
        "sampler/lag": float(lag),
    }


def room(config: JobConfig, rollout: int, device: torch.device, smaller: str) -> list[str]:
    """Return a line: the bytes of any waiting rollouts, each of ``rollout``; the loss's anchor.

    Raises:
        ConfigError: they may take more than half of the memory; ``smaller`` says what to lower.
    """
    if not config.collector.staleness:
        return []
    size, whole = config.collector.staleness * rollout, memory(device)
    words = f"collector.staleness={config.collector.staleness}: the waiting rollouts take up to"
    if size > whole / 2:
        raise ConfigError(
            f"{words} {size / 1e9:.3g} GB, more than half of {whole / 1e9:.3g} GB; lower it, "
            f"{smaller}"
        )
    name, anchor = config.loss.name, f"loss.anchor={config.anchor}"
    if not isinstance(config.loss, ClipConfig):  # only that loss has the setting
        anchor = f"loss={name} {_ANCHORS.get(name, 'keeps KL(old||new) and the anchor old')}"
    return [f"{words} {size / 1e6:.3g} MB; {anchor}"]


def memory(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
