"""Numbers over the whole vocabulary from kept hidden states, in bounded memory.

A policy's next-token distributions are kept as hidden states [B, R, D] and a head; logits [.., V]
exist for one chunk of tokens at a time, in the backward pass too (a chunk is computed again there).
Padding is dropped before the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from klrl.language.causal_lm import Head

#: Logits in one chunk where the caller says nothing: 256 MB of float32.
CHUNK_ELEMENTS = 2**26
LARGE_VOCABULARY = 2**18


@dataclass(frozen=True)
class NextTokens:
    """The distributions that B responses were, or are, drawn from.

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
        """Tokens whose logits fit one chunk, where the caller says nothing."""
        weight = getattr(self.head, "weight", None)
        vocabulary = weight.shape[0] if weight is not None else LARGE_VOCABULARY
        return max(1, CHUNK_ELEMENTS // vocabulary)

    def log_softmax(self, states: Tensor) -> Tensor:
        """[n, D] -> [n, V], nats, float32 at least."""
        return tempered_log_softmax(self.head(states), self.temperature)


def tempered_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log softmax(logits / temperature), float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def response_log_probs(
    policy: NextTokens, tokens: Tensor, mask: Tensor, chunk: int | None = None
) -> Tensor:
    """Log-prob of every response token.

    Args:
        policy: whose.
        tokens: [B, R].
        mask: [B, R] bool; padding gives 0, and no gradient.
        chunk: tokens at a time; None for about 256 MB of logits.

    Returns:
        [B, R], nats.
    """

    def of_chunk(states: Tensor, chosen: Tensor) -> Tensor:
        return chosen_of(policy.log_softmax(states), chosen)[None]

    return over_tokens(of_chunk, [policy.states, tokens], mask, chunk or policy.chunk)[0]


def token_entropy(policy: NextTokens, mask: Tensor, chunk: int | None = None) -> Tensor:
    """Entropy of every next-token distribution, [B, R] nats; 0 at padding."""

    def of_chunk(states: Tensor) -> Tensor:
        log_p = policy.log_softmax(states)
        return -expected(log_p, log_p)[None]

    return over_tokens(of_chunk, [policy.states], mask, chunk or policy.chunk)[0]


def chosen_of(table: Tensor, tokens: Tensor) -> Tensor:
    """The entries [n] of a table [n, V] at tokens [n]."""
    return table.gather(-1, tokens[:, None]).squeeze(-1)


def expected(log_p: Tensor, value: Tensor) -> Tensor:
    """sum_v p(v) value(v); a token that the model forbids (-inf) adds 0, to the gradient too."""
    forbidden = log_p == -torch.inf
    return (log_p.masked_fill(forbidden, 0.0).exp() * value).masked_fill(forbidden, 0.0).sum(-1)


def over_tokens(
    function: Callable[..., Tensor], inputs: list[Tensor], mask: Tensor, chunk: int
) -> Tensor:
    """Apply [n, ...] -> [k, n] to the real tokens, chunk by chunk; [k, B, R] with zeros elsewhere.

    Beyond one chunk the logits of each are dropped and computed again in the backward pass.
    """
    real = mask.flatten().nonzero().squeeze(-1)
    flat = [value.flatten(0, 1).index_select(0, real) for value in inputs]
    if real.numel() <= chunk:
        found = function(*flat)
    else:
        pieces = zip(*(value.split(chunk) for value in flat), strict=True)
        found = torch.cat([_recomputed(function, piece) for piece in pieces], 1)
    spread = found.new_zeros(found.shape[0], mask.numel()).index_copy(1, real, found)
    return spread.unflatten(1, mask.shape)


def _recomputed(function: Callable[..., Tensor], piece: tuple[Tensor, ...]) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*piece)
    return checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False)
