"""The exact KL between two next-token distributions, over the whole vocabulary.

Hidden states are kept, logits never: with a vocabulary of 152,000 tokens, the float32 logits of one
response of 512 tokens take 311 MB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klrl.language.vocabulary import NextTokens, chosen_of, expected, over_tokens


def exact_token_kl(
    policy: NextTokens, other: NextTokens, mask: Tensor, chunk: int | None = None
) -> Tensor:
    """KL(policy || other) of every response token, over the whole vocabulary.

    Args:
        policy: the first distribution.
        other: the second; gradients flow into both where their tensors require them.
        mask: [B, R] bool; padding gives 0, and no gradient.
        chunk: tokens at a time; None for about 256 MB of logits.

    Returns:
        [B, R], nats.
    """

    def of_chunk(states: Tensor, other_states: Tensor) -> Tensor:
        return _kl(policy.log_softmax(states), other.log_softmax(other_states))[None]

    return over_tokens(of_chunk, [policy.states, other.states], mask, chunk or policy.chunk)[0]


def log_probs_and_exact_kl(
    policy: NextTokens,
    reference: NextTokens,
    tokens: Tensor,
    mask: Tensor,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both log-probs and the exact KL, with each head applied once.

    Returns:
        (log pi, log pi_ref, KL(policy || reference)), each [B, R], nats.
    """

    def of_chunk(states: Tensor, ref_states: Tensor, chosen: Tensor) -> Tensor:
        log_p, log_q = policy.log_softmax(states), reference.log_softmax(ref_states)
        return torch.stack([chosen_of(log_p, chosen), chosen_of(log_q, chosen), _kl(log_p, log_q)])

    inputs = [policy.states, reference.states, tokens]
    log_prob, ref_log_prob, kl = over_tokens(of_chunk, inputs, mask, chunk or policy.chunk)
    return log_prob, ref_log_prob, kl


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v p(v) (log p(v) - log q(v)), [n]."""
    return expected(log_p, log_p - log_q)
