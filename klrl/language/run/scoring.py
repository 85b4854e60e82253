"""Computes the hidden states that predict response tokens, in one row per prompt or per response.

Shared layout: one row [prompt | r1 .. rG | padding] per prompt, so each prompt is computed once.
Each response attends to the prompt and to itself; its position ids continue those of the prompt.
Shared rows omit the last token of each response, which predicts nothing. Packed layout: one row
[prompt | response | padding] per response, see :func:`packed_states`.
:mod:`klrl.language.model.vocabulary` applies head and log-softmax to the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.language.data.batch import ATTENTION, prompt_length, response_mask, take_prompts
from klrl.language.model.causal_lm import (
    backbone,
    head,
    model_dtype,
    positions,
    sharing_refused,
    unwrapped,
    without_dropout,
)
from klrl.language.model.plain import (
    choose_way,
    max_difference,
    packed_states,
    plain_log_probs,
    rows_to_compare,
)
from klrl.language.model.vocabulary import NextTokens, response_log_probs


def shared_states(model: nn.Module, batch: TensorDictBase, group_size: int) -> Tensor:
    """Compute the same states as :func:`packed_states`, in one row per prompt.

    The model's attention takes a 4-D mask.

    Raises:
        ValueError: a prompt with its response is longer than the model's context.
    """
    rows = pack(batch, group_size)
    check_length(unwrapped(model), int(rows.positions.max()) + 2)
    with without_dropout(model):
        output = backbone(model)(
            input_ids=rows.tokens,
            attention_mask=tree_mask(rows.segments, model_dtype(model)),
            position_ids=rows.positions,
            use_cache=False,
        )
    hidden = output.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, rows.source.flatten()).unflatten(0, (len(batch), -1))


@dataclass(frozen=True)
class SharedRows:
    """N rows of L tokens; each row is a prompt and its G responses, with padding on the right.

    Attributes:
        tokens: [N, L].
        positions: position ids [N, L]; each response continues those of the prompt.
        segments: [N, L]: 0 for the prompt, 1 .. G for the responses, -1 for padding.
        source: [B, R]: the index in [N x L] of the state that predicts each response token.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    source: Tensor


def pack(batch: TensorDictBase, group_size: int) -> SharedRows:
    """Arrange the batch as one row per prompt.

    A response of n tokens takes n - 1 slots, since its last token predicts nothing.
    """
    width = prompt_length(batch)
    first = batch[::group_size]
    prompt_mask = first[ATTENTION][:, :width]
    count, device = prompt_mask.shape[0], prompt_mask.device
    mask = response_mask(batch).unflatten(0, (count, group_size))  # [N, G, R]
    fed = mask[:, :, 1:]  # feed token t only if there is a token t + 1
    steps = fed.shape[-1]

    real = torch.cat([prompt_mask, fed.flatten(1)], 1)
    tokens = torch.cat(
        [
            first["tokens", "prompt"],
            batch["tokens", "response"][:, :-1].reshape(count, group_size * steps),
        ],
        1,
    )
    length = prompt_mask.sum(1)  # [N]
    after = length[:, None] + torch.arange(steps, device=device).repeat(group_size)
    position_ids = torch.cat([positions(prompt_mask), after], 1)
    response = torch.arange(1, group_size + 1, device=device).repeat_interleave(steps)
    segment = torch.cat([response.new_zeros(width), response]).expand(count, -1)

    totals = real.sum(1)  # [N]
    longest = int(totals.max())
    order = real.long().argsort(dim=1, descending=True, stable=True)[:, :longest]
    padding = torch.arange(longest, device=device) >= totals[:, None]

    slot = real.long().cumsum(1) - 1  # the packed position of each token in its row
    before = (length - 1)[:, None, None].expand(count, group_size, 1)
    source = torch.cat([before, slot[:, width:].reshape(count, group_size, steps)], 2)
    source = source + longest * torch.arange(count, device=device)[:, None, None]
    return SharedRows(
        tokens=tokens.gather(1, order),
        positions=position_ids.gather(1, order).masked_fill(padding, 0),
        segments=segment.gather(1, order).masked_fill(padding, -1),
        source=source.flatten(0, 1),
    )


def tree_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention bias [N, 1, L, L]: 0 for visible tokens, else the dtype's minimum.

    A token sees itself and the earlier tokens of the prompt and of its own response.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    visible = causal & ((key == 0) | (key == query))
    bias = torch.zeros(visible.shape, dtype=dtype, device=segments.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


@dataclass(frozen=True)
class ScoringLayout:
    """The layout in which a model computes log-probs of responses, and the reason for it.

    ``shared``: one row per prompt; else one packed row per response. ``tokens``: in one forward,
    padding included; None: whole prompts. ``reason``: the preflight's line about this choice.
    """

    group_size: int
    shared: bool
    reason: str = ""
    tokens: int | None = None

    def parts(self, batch: TensorDictBase, prompts: int = 1) -> tuple[Tensor, ...]:
        """Split the rows of a batch into those of one forward each, [n], in order.

        They are those of ``prompts`` prompts, or have :attr:`tokens` tokens; or it is one row.
        """
        rows = torch.arange(len(batch), device=batch["tokens", "full"].device)
        if self.tokens is None:
            return rows.split(prompts * self.group_size)
        sizes, longest = [0], 0
        for length in batch[ATTENTION].sum(1).tolist():
            longest = max(longest, length)
            if sizes[-1] and longest * (sizes[-1] + 1) > self.tokens:
                sizes, longest = [*sizes, 0], length
            sizes[-1] += 1
        return rows.split(sizes)

    def states(self, model: nn.Module, batch: TensorDictBase) -> Tensor:
        """Compute the hidden states [B, R, D] that predict response tokens, differentiable."""
        if self.shared:
            return shared_states(model, batch, self.group_size)
        return packed_states(model, batch)

    def next_tokens(
        self, model: nn.Module, batch: TensorDictBase, temperature: float
    ) -> NextTokens:
        """Compute the next-token distributions at response tokens, differentiable."""
        return NextTokens(self.states(model, batch), head(model), temperature)

    @torch.no_grad()
    def rollout_states(
        self,
        model: nn.Module,
        batch: TensorDictBase,
        prompts_at_a_time: int,
        during: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Iterator[Tensor]:
        """Yield the states [n, R, D] of each of :meth:`parts`, without gradient.

        Each forward runs inside a context of its own, ``during()``.
        """
        for rows in self.parts(batch, prompts_at_a_time):
            with during():
                states = [self.states(model, batch[rows])]
            yield states.pop()  # whose memory is the caller's to free


#: Attention with a mask over L tokens costs as much as L / ATTENTION times all else, forward and
#: backward: fitted to CPU seconds at P = 32 .. 512, G = 4 .. 16, R = 16 .. 512, D = 256 and 576
#: (docs/sampler.md).
ATTENTION_LENGTH = 3000.0


def costs(prompt: int, responses: int, longest: int) -> tuple[float, float]:
    """Return the costs (shared, packed) of scoring a prompt's G responses, in tokens.

    L (1 + L / :data:`ATTENTION_LENGTH`) with L = P + G R, and G (P + R), whose attention needs no
    mask and is fast.
    """
    row = prompt + responses * longest
    return row * (1 + row / ATTENTION_LENGTH), float(responses * (prompt + longest))


#: ``ScoringLayout.shared`` -> words for a message.
NAMES = {
    True: "scored in one row per prompt",
    False: "scored in one row per response, padded on the right",
}


@torch.no_grad()
def self_check(
    model: nn.Module,
    batch: TensorDictBase,
    group_size: int,
    longest: int = 0,
    shared_before: bool | None = None,
    tokens: int | None = None,
) -> ScoringLayout:
    """Choose the cheapest layout whose log-probs of a few responses equal the plain forward's.

    Costs are those of responses of ``longest`` tokens, see :func:`costs`. A resumed run gives
    ``shared_before``, its layout, which is then tried first. Rows of ``tokens`` tokens are packed.

    Raises:
        ValueError: each layout fails or has wrong log-probs.
    """
    chosen = torch.arange(min(4, len(batch) // group_size), device=batch.device)
    few = take_prompts(batch, chosen, group_size)
    rows = rows_to_compare(few, group_size)
    response, mask = few["tokens", "response"], response_mask(few)

    def scores(layout: ScoringLayout) -> Tensor:
        return response_log_probs(layout.next_tokens(model, few, 1.0), response, mask)

    def off(shared: bool) -> float:
        plain, scored = plain_log_probs(model, few[rows]), scores(ScoringLayout(group_size, shared))
        others = scores(ScoringLayout(group_size, False))
        return max_difference((scored[rows], plain), (scored, others))

    refused = sharing_refused(model)
    notes = [] if refused is None else [refused]
    prompt = int(few[ATTENTION][:, : prompt_length(few)].sum(1).max())
    shared_cost, packed_cost = costs(prompt, group_size, longest)
    share = shared_cost <= packed_cost if shared_before is None else shared_before
    if tokens is not None:
        share = False
    elif refused is None and not share:
        notes.append(f"one row per prompt would cost {shared_cost / packed_cost:.1f} times as much")
    order = (share, not share) if refused is None and tokens is None else (False,)
    ways = {shared: NAMES[shared] for shared in order}
    shared, check = choose_way(model, "to score", ways, off, notes)
    return ScoringLayout(group_size, shared, str(check), tokens)
