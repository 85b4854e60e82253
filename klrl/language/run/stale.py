"""``collector.staleness`` and ``collector.dtype``: rollouts of a sampler mu that is not pi_old.

A rollout keeps mu's log-probs, its hidden states and its head, so KL(mu||policy) is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from klrl.config import LanguageConfig, SamplerConfig
from klrl.language.data.batch import (
    LOG_PROBS,
    SAMPLER_LOG_PROBS,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import computing_in_bfloat16, head, weight_of
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.load import Policy
from klrl.language.run.rollout import PromptRollout, exact_every
from klrl.runs.metrics import Row
from klrl.train import stale

#: KL(mu||policy) at each token before the update [B, R].
SAMPLER_KL = ("kl", "sampler")


class StaleResponses(stale.StaleRollout):
    """The rollouts [B] of N updates ago, with the heads of ``model`` that sampled them."""

    rollout: PromptRollout
    head: nn.Module | None = None  # the frozen head that sampled the latest rollout

    def __init__(self, model: nn.Module, config: SamplerConfig) -> None:
        super().__init__(config.staleness)
        self.model, self.dtype = model, config.dtype

    def sampling(self) -> AbstractContextManager[None]:
        """Inside this context, the policy computes as the sampler does."""
        return nullcontext() if self.dtype is None else computing_in_bfloat16(self.model)

    def frozen_head(self) -> nn.Module:
        """Return a frozen copy of the policy's head, which computes as the sampler does."""
        with self.sampling():
            now: nn.Module = head(self.model)  # type: ignore[assignment]
            return deepcopy(now).requires_grad_(False)

    def sample(self) -> dict[str, Any]:
        """Sample a rollout, and copy the head; count the prompts served before."""
        served = self.rollout.prompts.served
        with self.sampling():
            batch = self.rollout.collect()
        weights = dict(self.frozen_head().state_dict())
        return {"batch": batch.to_dict(), "head": weights, "served": served}

    def recall(self, oldest: Mapping[str, Any]) -> TensorDictBase:
        """Restore the head, and the collector's prompts."""
        self.head = self.frozen_head()
        self.head.load_state_dict(oldest["head"])
        size, device = len(oldest["batch"]["tokens"]["prompt"]), next(self.head.parameters()).device
        batch = TensorDict(oldest["batch"], [size], device=device)
        self.rollout.recall(batch, oldest["served"])
        return batch


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
    log_mu, old = (response_part(batch, key) for key in (SAMPLER_LOG_PROBS, LOG_PROBS))
    return stale.compare(exact, log_mu, old, lag, mask)


def room(config: LanguageConfig, policy: Policy) -> list[str]:
    """Return a line about the memory of the waiting rollouts, if there are any; see stale.room."""
    weight = weight_of(policy.model.get_output_embeddings())  # type: ignore[operator]
    wide = config.collector.max_new_tokens * weight.shape[-1] * weight.element_size()
    size = config.frames_per_iteration * wide * (exact_every(config) > 0) + weight.nbytes
    smaller = "collector.prompts or collector.max_new_tokens"
    return stale.room(config, size, weight.device, smaller)
