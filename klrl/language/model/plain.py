"""Computes log-probs by a model's plain forward, to check faster computations against them.

:func:`plain_log_probs` feeds the model one unpadded row at a time. :func:`packed_states` feeds it
many rows at once, with all padding on the right. Neither uses a cache, a mask or position ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.base.errors import first_line
from klrl.kl.from_logits import tempered_log_softmax
from klrl.language.data.batch import (
    ATTENTION,
    LOG_PROBS,
    prompt_length,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import (
    backbone,
    head,
    in_full_precision,
    model_dtype,
    unwrapped,
    without_dropout,
)
from klrl.language.model.vocabulary import NextTokens, response_log_probs
from klrl.train.preflight import Check

WayT = TypeVar("WayT")
#: dtype -> largest allowed difference, in nats, between two computations of the same log-probs.
AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-1}


def error_and_bound(model: nn.Module, measure: Callable[[], float]) -> tuple[float, float]:
    """Return the largest error of a method of sampling or scoring, and the allowed error, in nats.

    ``measure`` returns the largest difference from plain log-probs. A mixed model is first measured
    in float32, since bfloat16's bound would hide errors.
    """
    if model_dtype(model) != next(model.parameters()).dtype:
        with in_full_precision(model):
            off, bound = measure(), AGREEMENT[model_dtype(model)]
        if not off <= bound:
            return off, bound
    return measure(), AGREEMENT[model_dtype(model)]


def choose_way(
    model: nn.Module,
    what: str,
    ways: Mapping[WayT, str],
    error_of: Callable[[WayT], float],
    wrong: Sequence[str] = (),
) -> tuple[WayT, Check]:
    """Choose the fastest way to sample or score whose log-probs equal the plain forward's.

    ``ways``: way -> description, the fastest first; ``wrong``: reasons why others are not tried.
    ``error_of``: way -> the largest difference from plain log-probs, in nats.

    Returns:
        The chosen way, and a check whose detail says why faster ways were rejected.

    Raises:
        ValueError: each way fails or has wrong log-probs.
    """
    bound, found = AGREEMENT[model_dtype(model)], list(wrong)
    for way, words in ways.items():
        try:
            off, bound = error_and_bound(model, partial(error_of, way))
        except torch.OutOfMemoryError:  # does not show that the way is wrong
            raise
        except Exception as error:  # a model's code may raise any exception on a mask or cache
            found.append(f"{words}: {type(error).__name__}: {first_line(error)}")
            continue
        if off <= bound:
            return way, Check(f"{words}; log-prob error, nats", off, bound, "; ".join(found))
        found.append(f"{words}: off by {off:.3g} nats")
    raise ValueError(
        f"{type(unwrapped(model)).__name__}: no way {what} reproduces its own log-probs within "
        f"{bound:g} nats ({'; '.join(found)}); choose another model"
    )


@torch.no_grad()
def plain_log_probs(model: nn.Module, batch: TensorDictBase) -> Tensor:
    """Compute the response tokens' log-probs at temperature 1, one unpadded row per forward.

    Return [B, R], float64, nats; 0 at padding.
    """
    network = unwrapped(model)
    tokens, mask = batch["tokens", "full"], response_mask(batch)
    scores = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    with without_dropout(model):
        for row, real in enumerate(batch[ATTENTION]):
            ids, length = tokens[row][real], int(mask[row].sum())
            logits = network(input_ids=ids[None], use_cache=False).logits[0, -length - 1 : -1]
            log_p = tempered_log_softmax(logits, 1.0)
            scores[row, :length] = log_p.gather(-1, ids[-length:, None]).squeeze(-1).double()
    return scores


def rows_to_compare(batch: TensorDictBase, group_size: int) -> Tensor:
    """Return the indices of one row per prompt: for prompt i, the row of its response i mod G."""
    prompts = torch.arange(len(batch) // group_size, device=batch["tokens", "full"].device)
    return prompts * group_size + prompts % group_size


@torch.no_grad()
def largest_error(model: nn.Module, batch: TensorDictBase, group_size: int) -> float:
    """Return the largest error, in nats, of the log-probs in a batch sampled at temperature 1.

    Compares pairwise the log-probs of the batch, of :func:`packed_states` and of
    :func:`plain_log_probs`; the latter are computed for only one response to each prompt.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    sampled = response_part(batch, LOG_PROBS)
    states = packed_states(model, batch)
    scored = response_log_probs(NextTokens(states, head(model)), tokens, mask)
    rows = rows_to_compare(batch, group_size)
    plain = plain_log_probs(model, batch[rows])
    return max_difference((sampled[rows], plain), (scored[rows], plain), (sampled, scored))


def max_difference(*pairs: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute difference within the pairs; NaN if a tensor contains NaN."""
    differences = [(one.double() - other.double()).abs().max() for one, other in pairs]
    return float(torch.stack(differences).max())


def packed_states(model: nn.Module, batch: TensorDictBase) -> Tensor:
    """Compute hidden states by the plain forward, one row per response, all padding on the right.

    A causal model ignores later tokens, so no mask and no position ids are needed. Padding on the
    left would change the state of a recurrent model. Return the states that predict the response
    tokens, [B, R, D], differentiable; undefined at padding.

    Raises:
        ValueError: a row is longer than the model's context.
    """
    real = batch[ATTENTION]
    lengths = real.sum(1)
    check_length(unwrapped(model), int(lengths.max()))
    tokens = packed(batch["tokens", "full"], real)[:, : int(lengths.max()) - 1]
    with without_dropout(model):
        hidden = plain_states(model, tokens)
    width = response_mask(batch).shape[1]
    before = real[:, : prompt_length(batch)].sum(1, keepdim=True) - 1
    source = before + torch.arange(width, device=before.device)
    source = source.clamp_max(hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, source)


def plain_states(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute states [B, T, D] of tokens [B, T] by the plain forward: no mask, no cache."""
    states: Tensor = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
    return states


def packed(tokens: Tensor, real: Tensor) -> Tensor:
    """Move the tokens [B, T] that ``real`` marks to the left of their rows, in order."""
    return tokens.gather(1, real.long().argsort(dim=1, descending=True, stable=True))
