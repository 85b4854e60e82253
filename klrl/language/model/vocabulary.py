"""Computes log-probs, KLs and entropies over the whole vocabulary, in bounded memory.

Next-token distributions are stored as hidden states [B, R, D] and a head. If a batch has more than
:data:`CHUNK_ELEMENTS` logits, they are computed in pieces, and again in the backward pass. Padding
is dropped before the head is applied. With a vocabulary of 152,000 tokens, the float32 logits of
512 tokens take 311 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from klrl.kl.divergences import Which, expected, over_actions
from klrl.kl.from_logits import CLOSED_FORM, Other, log_probs_and_kls, tempered_log_softmax
from klrl.language.model.causal_lm import Head, weights_cast_once

#: Maximum number of logits that a policy keeps for a backward pass; 268 MB in float32.
CHUNK_ELEMENTS = 2**26
#: Pieces per :data:`CHUNK_ELEMENTS` logits: few if the backward pass recomputes logits, since each
#: piece then allocates a gradient of the head's size; else pieces of 27 MB, which are fastest.
_PART_RECOMPUTED, _PART_WITHOUT_GRADIENT = 4, 10
LARGE_VOCABULARY = 2**18
#: States [B, R, D]; or, without gradient, pieces [n, R, D] of adjacent rows, to store them nowhere.
States: TypeAlias = Tensor | Iterable[Tensor]


@dataclass(frozen=True)
class NextTokens:
    """The next-token distributions at every position of B responses.

    They are softmax(head(states) / temperature), with states [B, R, D].
    """

    states: States
    head: Head
    temperature: float = 1.0

    @property
    def chunk(self) -> int:
        """The number of tokens whose logits may be kept for a backward pass."""
        weight = getattr(self.head, "weight", None)
        vocabulary = weight.shape[0] if weight is not None else LARGE_VOCABULARY
        return max(1, CHUNK_ELEMENTS // vocabulary)


class Against(NamedTuple):
    """A second policy's distributions at the same positions, and the divergences to measure.

    Attributes:
        other: the distributions q.
        names: names in :mod:`klrl.kl.divergences`; reverse is KL(policy || other), forward is
            KL(other || policy).
    """

    other: NextTokens
    names: Sequence[Which] = ("reverse",)


class Compared(NamedTuple):
    """log q of the tokens, and name -> divergence between pi and q; each [B, R], nats."""

    log_prob: Tensor
    divergence: dict[Which, Tensor]


def token_measures(
    policy: NextTokens, tokens: Tensor, mask: Tensor, against: Sequence[Against] = ()
) -> tuple[Tensor, list[Compared]]:
    """Compute log-probs, and divergences over the whole vocabulary; apply each head once.

    Args:
        policy: the distributions pi.
        tokens: [B, R].
        mask: [B, R] bool; padding gives 0, and no gradient.
        against: for each q, its distributions and the divergences to measure.

    Returns:
        log pi of the tokens [B, R], nats, and a :class:`Compared` for each q.
    """

    def of_chunk(chosen: Tensor, states: Tensor, *other_states: Tensor) -> Tensor:
        logits = policy.head(states)
        tables = [q.other.head(s) for q, s in zip(against, other_states, strict=True)]
        closed = all(name in CLOSED_FORM for q in against for name in q.names)
        learned = any(table.requires_grad for table in tables)
        of_logits = log_probs_and_kls if closed and not learned else _by_autograd
        others = [
            Other(table, q.other.temperature, q.names)
            for table, q in zip(tables, against, strict=True)
        ]
        return of_logits(logits, chosen, others, policy.temperature)

    inputs = [tokens, policy.states, *(q.other.states for q in against)]
    rows = iter(over_tokens(of_chunk, inputs, mask, policy.chunk))
    log_prob = next(rows)
    return log_prob, [Compared(next(rows), {n: next(rows) for n in q.names}) for q in against]


def _by_autograd(
    logits: Tensor, tokens: Tensor, others: Sequence[Other], temperature: float
) -> Tensor:
    """Like :func:`log_probs_and_kls`, but for any divergence and with gradients into each q."""
    log_p = tempered_log_softmax(logits, temperature)
    rows = [chosen_of(log_p, tokens)]
    for other in others:
        log_q = tempered_log_softmax(other.logits, other.temperature)
        rows.append(chosen_of(log_q, tokens))
        rows += [over_actions(name, log_p, log_q) for name in other.names]
    return torch.stack(rows)


def response_log_probs(policy: NextTokens, tokens: Tensor, mask: Tensor) -> Tensor:
    """Compute the log-prob of every response token, [B, R] nats; see :func:`token_measures`."""
    return token_measures(policy, tokens, mask)[0]


def exact_token_kl(policy: NextTokens, other: NextTokens, mask: Tensor) -> Tensor:
    """Compute KL(policy || other) at each response token, [B, R] nats; both policies get gradients.

    See :func:`token_measures`.
    """
    any_token = torch.zeros_like(mask, dtype=torch.long)
    _, [compared] = token_measures(policy, any_token, mask, [Against(other)])
    return compared.divergence["reverse"]


def token_entropy(policy: NextTokens, mask: Tensor) -> Tensor:
    """Compute the entropy of every next-token distribution, [B, R] nats; 0 at padding."""

    def of_chunk(states: Tensor) -> Tensor:
        log_p = tempered_log_softmax(policy.head(states), policy.temperature)
        return -expected(log_p, log_p)[None]

    return over_tokens(of_chunk, [policy.states], mask, policy.chunk)[0]


def chosen_of(values: Tensor, tokens: Tensor) -> Tensor:
    """Select the entries [n] of values [n, V] at tokens [n]."""
    return values.gather(-1, tokens[:, None]).squeeze(-1)


def over_tokens(
    function: Callable[..., Tensor], inputs: Sequence[States], mask: Tensor, chunk: int
) -> Tensor:
    """Apply ``function``, [n, ...] -> [k, n], to the real tokens; return [k, B, R], 0 at padding.

    With more than ``chunk`` tokens, the backward pass calls ``function`` again, piece by piece.
    """
    real = mask.flatten().nonzero().squeeze(-1)
    learning = torch.is_grad_enabled()
    recomputed = learning and real.numel() > chunk
    part = _PART_RECOMPUTED if recomputed else 1 if learning else _PART_WITHOUT_GRADIENT
    size = max(1, chunk // part)
    pieces = zip(*(_split(value, mask, real, size) for value in inputs), strict=True)
    if not learning:
        with weights_cast_once(mask.device):
            values = torch.cat([function(*piece) for piece in pieces], 1)
    elif not recomputed:
        values = function(*next(pieces))
    else:
        # Each piece casts the head's weight again: a shared cast would sum gradients in bfloat16.
        again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        values = torch.cat([again(*piece) for piece in pieces], 1)
    spread = values.new_zeros(values.shape[0], mask.numel()).index_copy(1, real, values)
    return spread.unflatten(1, mask.shape)


def _split(value: States, mask: Tensor, real: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the entries at real tokens, [n, ...], ``size`` at a time."""
    if isinstance(value, Tensor):
        # Without gradient by parts, each when its turn comes: copies take memory.
        parts = [real] if value.requires_grad else real.split(size)
        for chosen in parts:
            flat = value.flatten(0, 1).index_select(0, chosen)
            yield from flat.split(size) if len(flat) > size else [flat]
        return
    rows, rest = 0, list[Tensor]()
    for piece in value:
        rest.append(piece[mask[rows : rows + len(piece)]])
        rows += len(piece)
        del piece
        *whole, last = (torch.cat(rest) if len(rest) > 1 else rest[0]).split(size)
        rest = [last]
        yield from whole
    yield from rest
