"""The numbers that all others are compared with: a model's own logits of one row, without padding.

Nothing of klrl's is in them: no cache, no mask, no position ids, no head. Also the layout next to
it, rows packed to the left, which costs one forward for many rows.
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
    on_response,
    prompt_length,
    response_mask,
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
#: Largest difference of log-probs, in nats, between two ways to compute them, by dtype.
AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-1}


def off_and_bound(model: nn.Module, measure: Callable[[], float]) -> tuple[float, float]:
    """How far a way to sample or score is off, nats, and how far it may be.

    Rounding to bfloat16 hides a way that is wrong by .1: a mixed model computes in float32 first.

    Args:
        model: a causal LM.
        measure: the largest difference from plain log-probs, as the model computes when called.
    """
    if model_dtype(model) != next(model.parameters()).dtype:
        with in_full_precision(model):
            off, bound = measure(), AGREEMENT[model_dtype(model)]
        if not off <= bound:
            return off, bound
    return measure(), AGREEMENT[model_dtype(model)]


def first_right(
    model: nn.Module,
    what: str,
    ways: Mapping[WayT, str],
    off_by: Callable[[WayT], float],
    wrong: Sequence[str] = (),
) -> tuple[WayT, Check]:
    """The fastest way to sample or score that gives the model's own log-probs.

    Args:
        model: a causal LM.
        what: is chosen: to sample or to score.
        ways: with their words, the fastest first.
        off_by: way -> the largest difference from plain log-probs.
        wrong: why others are not tried.

    Returns:
        The way, and its check, with what was wrong with faster ones.

    Raises:
        ValueError: none is right: this family cannot be sampled, or scored.
    """
    bound, found = AGREEMENT[model_dtype(model)], list(wrong)
    for way, words in ways.items():
        try:
            off, bound = off_and_bound(model, partial(off_by, way))
        except torch.OutOfMemoryError:  # it says nothing about the family
            raise
        except Exception as error:  # whatever a family's code raises of a mask or a cache
            found.append(f"{words}: {type(error).__name__}: {first_line(error)}")
            continue
        if off <= bound:
            return way, Check(f"{words}, nats off plain log-probs", off, bound, "; ".join(found))
        found.append(f"{words}: {off:.3g} nats off")
    raise ValueError(
        f"{type(unwrapped(model)).__name__}: no way {what} gives its own log-probs to {bound:g} "
        f"nats ({'; '.join(found)}); choose another model"
    )


@torch.no_grad()
def plain_log_probs(model: nn.Module, batch: TensorDictBase) -> Tensor:
    """Log-probs of the response tokens, a row at a time, unpadded, from the model's own logits.

    Args:
        model: a causal LM.
        batch: [B].

    Returns:
        [B, R], float64, nats; 0 at padding.
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
    """A row of each prompt, another of its G each time, to be compared with the plain forward."""
    prompts = torch.arange(len(batch) // group_size, device=batch["tokens", "full"].device)
    return prompts * group_size + prompts % group_size


@torch.no_grad()
def off_plain(model: nn.Module, batch: TensorDictBase, group_size: int) -> float:
    """How far the batch's own log-probs, at temperature 1, are off, nats: the largest difference.

    A row of each prompt is compared with :func:`plain_log_probs`; all, with rows packed to the
    left, which are compared with the plain ones too.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    sampled = on_response(batch, LOG_PROBS)
    states = packed_states(model, batch)
    scored = response_log_probs(NextTokens(states, head(model)), tokens, mask)
    rows = rows_to_compare(batch, group_size)
    plain = plain_log_probs(model, batch[rows])
    return max_off((sampled[rows], plain), (scored[rows], plain), (sampled, scored))


def max_off(*pairs: tuple[Tensor, Tensor]) -> float:
    """The largest difference within pairs of tensors; NaN where one of them holds it."""
    differences = [(one.double() - other.double()).abs().max() for one, other in pairs]
    return float(torch.stack(differences).max())


def packed_states(model: nn.Module, batch: TensorDictBase) -> Tensor:
    """The states from one row per response whose padding is all on the right: the plain forward.

    A causal model does not see what is behind a token, so neither mask nor position ids are needed,
    and a recurrent state never meets padding before a prompt.

    Args:
        model: a causal LM.
        batch: [B].

    Returns:
        [B, R, D], differentiable; undefined at padding.

    Raises:
        ValueError: longer than the model's context.
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
    """The states [B, T, D] of tokens [B, T] by the plain forward: no mask, no cache."""
    states: Tensor = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
    return states


def packed(tokens: Tensor, real: Tensor) -> Tensor:
    """Rows [B, T] with their real tokens moved to the left, in order."""
    return tokens.gather(1, real.long().argsort(dim=1, descending=True, stable=True))
