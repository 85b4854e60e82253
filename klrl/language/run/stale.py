"""``collector.staleness`` and ``collector.dtype``: rollouts of a sampler mu that is not pi_old.

A rollout keeps mu's log-probs, its hidden states and its head, so KL(mu||policy) is exact.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig
from klrl.kl.estimators import estimate_kl, masked_mean
from klrl.language.data.batch import (
    LOG_PROBS,
    SAMPLER_LOG_PROBS,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import computing_in_bfloat16, head, weight_of
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.load import Policy
from klrl.language.run.rollout import PromptRollout
from klrl.runs.metrics import Row

#: KL(mu||policy) at each token before the update [B, R].
SAMPLER_KL = ("kl", "sampler")


@dataclass
class Waiting:
    """A rollout before its update.

    Attributes:
        batch: [B], scored.
        head: mu's head, frozen.
        served: number of prompts that the stream had served before.
        updates: number of updates that mu had made.
    """

    batch: TensorDictBase
    head: nn.Module
    served: int
    updates: int


class RolloutQueue:
    """The rollouts that wait for their update, oldest first; a checkpoint contains them.

    Args:
        model: the policy's model; a restored rollout's head gets a copy of its structure.
        dtype: ``collector.dtype``.
    """

    def __init__(self, model: nn.Module, dtype: str | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.waiting: deque[Waiting] = deque()

    def sampling(self) -> AbstractContextManager[None]:
        """Inside this context, the policy computes as the sampler does."""
        return nullcontext() if self.dtype is None else computing_in_bfloat16(self.model)

    def frozen_head(self) -> nn.Module:
        """Return a frozen copy of the policy's head, which computes as the sampler does."""
        with self.sampling():
            now: nn.Module = head(self.model)  # type: ignore[assignment]
            return deepcopy(now).requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        """Return the waiting rollouts, for a checkpoint."""
        return {
            "waiting": [
                {
                    "batch": _copied(each.batch.to_dict()),
                    "head": _copied(each.head.state_dict()),
                    "served": each.served,
                    "updates": each.updates,
                }
                for each in self.waiting
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's rollouts."""
        self.waiting.clear()
        for each in state["waiting"]:
            frozen = self.frozen_head()
            frozen.load_state_dict(each["head"])
            size = len(each["batch"]["tokens"]["prompt"])
            batch = TensorDict(each["batch"], [size], device=next(frozen.parameters()).device)
            self.waiting.append(Waiting(batch, frozen, each["served"], each["updates"]))


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, Mapping) else value.detach().clone().contiguous()
        for name, value in tensors.items()
    }


class StaleRollout:
    """Gives the rollouts that the policy of N updates ago sampled; the first, by the first policy.

    Args:
        rollout: samples with the current policy.
        queue: the rollouts that wait; on resume those of the checkpoint.
        staleness: N.
    """

    def __init__(self, rollout: PromptRollout, queue: RolloutQueue, staleness: int) -> None:
        self.rollout, self.queue, self.staleness = rollout, queue, staleness
        self.updates = rollout.iteration
        rollout.iteration += len(queue.waiting)
        self.current: Waiting | None = None

    @property
    def lag(self) -> int:
        """The number of updates since the latest rollout was sampled."""
        return 0 if self.current is None else self.updates - 1 - self.current.updates

    def collect(self) -> TensorDictBase:
        """Sample until N rollouts are newer than the oldest one, and return that one."""
        rollout, waiting = self.rollout, self.queue.waiting
        while len(waiting) <= self.staleness:
            served = rollout.prompts.served
            with self.queue.sampling():
                batch = rollout.collect()
            waiting.append(Waiting(batch, self.queue.frozen_head(), served, self.updates))
        self.current = waiting.popleft()
        self.updates += 1
        rollout.recall(self.current.batch, self.current.served)
        return self.current.batch

    def close(self) -> None:
        """Close the collector."""
        self.rollout.close()


@torch.no_grad()
def kl_to(mu: NextTokens, policy: NextTokens, batch: TensorDictBase) -> Tensor:
    """Compute KL(mu||policy) at the tokens of a batch [B], exactly; [B, R] nats."""
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    _, [compared] = token_measures(mu, tokens, mask, [Against(policy)])
    return compared.divergence["reverse"]


def sampler_row(batch: TensorDictBase, lag: int) -> Row:
    """Compare mu with the policy before the update: k3, exact and largest gap in nats; the lag.

    The batch [B] has log mu and log pi_old of its tokens, and any KL(mu||pi_old).
    """
    mask, exact = response_mask(batch), batch.get(SAMPLER_KL, None)
    log_mu, old = (response_part(batch, key).double() for key in (SAMPLER_LOG_PROBS, LOG_PROBS))
    row = {} if exact is None else {"kl/sampler/exact": float(masked_mean(exact.double(), mask))}
    return row | {
        "kl/sampler/k3": float(masked_mean(estimate_kl(log_mu, old, "k3", mask), mask)),
        "kl/sampler/max": float((log_mu - old).masked_fill(~mask, 0.0).abs().max()),
        "sampler/lag": float(lag),
    }


def room(config: LanguageConfig, policy: Policy) -> list[str]:
    """Return a line about the memory of the waiting rollouts, if there are any.

    Raises:
        ConfigError: the queue may take more than half of the memory.
    """
    collector, model = config.collector, policy.model
    if not collector.staleness:
        return []
    weight = weight_of(model.get_output_embeddings())  # type: ignore[operator]
    wide = collector.max_new_tokens * weight.shape[-1] * weight.element_size()
    wide *= config.exact_every > 0
    size = collector.staleness * (config.frames_per_iteration * wide + weight.nbytes)
    whole = _memory(weight.device)
    words = f"collector.staleness={collector.staleness}: the waiting rollouts take up to"
    if size > whole / 2:
        raise ConfigError(
            f"{words} {size / 1e9:.3g} GB, more than half of {whole / 1e9:.3g} GB; lower it, "
            "collector.prompts or collector.max_new_tokens"
        )
    return [f"{words} {size / 1e6:.3g} MB; loss.anchor={config.anchor}"]


def _memory(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
