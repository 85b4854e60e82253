"""Numbers over the whole vocabulary from kept hidden states, in bounded memory.

A policy's next-token distributions are kept as hidden states [B, R, D] and a head; logits [.., V]
exist for one chunk of tokens at a time, in the backward pass too, which recomputes each chunk.
Padding is dropped before the head. With a vocabulary of 152,000 tokens, the float32 logits of one
response of 512 tokens take 311 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from klrl.kl.divergences import Which, expected, over_actions
from klrl.language.causal_lm import Head
from klrl.language.mixed import weights_cast_once

#: Most logits that a backward pass keeps: 256 MB of float32, of each table that it needs.
CHUNK_ELEMENTS = 2**26
#: Where none are kept, this share of them at a time: less memory, and no slower.
_SMALLER = 4
LARGE_VOCABULARY = 2**18


@dataclass(frozen=True)
class NextTokens:
    """The next-token distributions at every position of B responses.

    Attributes:
        states: [B, R, D], the hidden state that predicts each response token.
        head: states -> logits.
        temperature: the distribution is softmax(logits / temperature).
    """

    states: Tensor
    head: Head
    temperature: float = 1.0

    @property
    def chunk(self) -> int:
        """The number of tokens whose logits a backward pass may keep."""
        weight = getattr(self.head, "weight", None)
        vocabulary = weight.shape[0] if weight is not None else LARGE_VOCABULARY
        return max(1, CHUNK_ELEMENTS // vocabulary)

    def log_softmax(self, states: Tensor) -> Tensor:
        """[n, D] -> [n, V], nats, at least float32."""
        return tempered_log_softmax(self.head(states), self.temperature)


def tempered_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log softmax(logits / temperature), at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def response_log_probs(policy: NextTokens, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-prob of every response token.

    Args:
        policy: the distributions.
        tokens: [B, R].
        mask: [B, R] bool; padding gives 0, and no gradient.

    Returns:
        [B, R], nats.
    """

    def of_chunk(states: Tensor, chosen: Tensor) -> Tensor:
        return chosen_of(policy.log_softmax(states), chosen)[None]

    return over_tokens(of_chunk, [policy.states, tokens], mask, policy.chunk)[0]


def token_entropy(policy: NextTokens, mask: Tensor) -> Tensor:
    """Entropy of every next-token distribution, [B, R] nats; 0 at padding."""

    def of_chunk(states: Tensor) -> Tensor:
        log_p = policy.log_softmax(states)
        return -expected(log_p, log_p)[None]

    return over_tokens(of_chunk, [policy.states], mask, policy.chunk)[0]


def exact_token_kl(policy: NextTokens, other: NextTokens, mask: Tensor) -> Tensor:
    """KL(policy || other) of every response token, over the whole vocabulary.

    Args:
        policy: the first distribution.
        other: the second; gradients flow into both where their tensors require them.
        mask: [B, R] bool; padding gives 0, and no gradient.

    Returns:
        [B, R], nats.
    """

    def of_chunk(states: Tensor, other_states: Tensor) -> Tensor:
        log_p, log_q = policy.log_softmax(states), other.log_softmax(other_states)
        return over_actions("reverse", log_p, log_q)[None]

    return over_tokens(of_chunk, [policy.states, other.states], mask, policy.chunk)[0]


def log_probs_and_divergences(
    policy: NextTokens,
    reference: NextTokens,
    tokens: Tensor,
    mask: Tensor,
    names: Sequence[Which] = ("reverse",),
) -> Tensor:
    """Both log-probs, and divergences over the whole vocabulary, with each head applied once.

    Args:
        policy: the distributions pi.
        reference: pi_ref's of the same tokens.
        tokens: [B, R].
        mask: [B, R] bool; padding gives 0, and no gradient.
        names: of :mod:`klrl.kl.divergences`; reverse is KL(policy || reference).

    Returns:
        [2 + names, B, R], nats: log pi, log pi_ref, then the divergences of each token's
        distribution.
    """

    def of_chunk(states: Tensor, ref_states: Tensor, chosen: Tensor) -> Tensor:
        log_p, log_q = policy.log_softmax(states), reference.log_softmax(ref_states)
        log_probs = [chosen_of(log_p, chosen), chosen_of(log_q, chosen)]
        # After the log-probs: autograd adds gradients up in this order, and rows keep their bits.
        return torch.stack([*log_probs, *(over_actions(name, log_p, log_q) for name in names)])

    inputs = [policy.states, reference.states, tokens]
    return over_tokens(of_chunk, inputs, mask, policy.chunk)


def chosen_of(values: Tensor, tokens: Tensor) -> Tensor:
    """The entries [n] of values [n, V] at tokens [n]."""
    return values.gather(-1, tokens[:, None]).squeeze(-1)


def over_tokens(
    function: Callable[..., Tensor], inputs: list[Tensor], mask: Tensor, chunk: int
) -> Tensor:
    """Apply [n, ...] -> [k, n] to the real tokens in chunks; [k, B, R] with zeros elsewhere.

    Of more than ``chunk`` tokens, logits are dropped and recomputed in the backward pass.
    """
    real = mask.flatten().nonzero().squeeze(-1)
    flat = [value.flatten(0, 1).index_select(0, real) for value in inputs]
    if real.numel() <= chunk and torch.is_grad_enabled():
        values = function(*flat)
    else:
        size = max(1, chunk // _SMALLER)
        pieces = zip(*(value.split(size) for value in flat), strict=True)
        with weights_cast_once(mask.device):
            values = torch.cat([_recomputed(function, piece) for piece in pieces], 1)
    spread = values.new_zeros(values.shape[0], mask.numel()).index_copy(1, real, values)
    return spread.unflatten(1, mask.shape)


def _recomputed(function: Callable[..., Tensor], piece: tuple[Tensor, ...]) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*piece)
    return checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False)
