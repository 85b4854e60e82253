"""Where rounding shows, a rollout is scored again before anything is made of it.

Sampling over a KV cache rounds otherwise than a forward over whole rows. In bfloat16 a token's
log-prob differs by up to .3 nats, and KL(policy||policy) of the two reads some 1e-3 nats per
token. So the policy is scored as its reference and its update are, in the same rows and batches:
equal policies then have a KL of 0 and a ratio of 1. Policies that differ round otherwise too, so
that a KL below that floor is not known, and each row tells it.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.kl.estimators import estimate_kl, masked_mean
from klrl.language.batch import LOG_PROBS, on_full, on_response, response_mask
from klrl.language.causal_lm import head
from klrl.language.rollout import STATES
from klrl.language.scoring import Layout
from klrl.language.vocabulary import NextTokens, response_log_probs
from klrl.runs.metrics import Row


@torch.no_grad()
def rescore(
    batch: TensorDictBase, model: nn.Module, layout: Layout, prompts: int, temperature: float
) -> Row:
    """Write states and log-probs of a rollout anew, as they are scored.

    Args:
        batch: [B], sampled from the model as it is.
        model: the policy.
        layout: how it is scored.
        prompts: at a time.
        temperature: of sampling.

    Returns:
        :func:`rounding` of the two.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    sampled = on_response(batch, LOG_PROBS)
    batch[STATES] = layout.rollout_states(model, batch, prompts)
    scored = response_log_probs(NextTokens(batch[STATES], head(model), temperature), tokens, mask)
    batch[LOG_PROBS] = on_full(batch, scored)
    return rounding(sampled, scored, mask)


def rounding(sampled: Tensor, scored: Tensor, mask: Tensor) -> Row:
    """How far two ways to compute the same log-probs are apart.

    Args:
        sampled: log pi of the tokens while they were sampled [B, R], nats.
        scored: the same by scoring.
        mask: [B, R] bool.

    Returns:
        ``kl/ref/floor``, the KL of the first way from the second by k3 (their true KL is 0), and
        ``policy/gap``, the largest difference of two log-probs.
    """
    sampled, scored = sampled.double(), scored.double()
    floor = masked_mean(estimate_kl(sampled, scored, "k3", mask), mask)
    gap = (sampled - scored).masked_fill(~mask, 0.0).abs().max()
    return {"kl/ref/floor": float(floor), "policy/gap": float(gap)}
