"""Samples responses token by token in klrl's own loop, which can feed the model in three ways.

| way | a prompt is computed | rows of the cache |
|---|---|---|
| shared | once for its G responses | one per prompt: the prompt's keys, then all responses' keys |
| copied | once for its G responses | one per response, with a copy of the prompt's keys or states |
| plain | again for every token | no cache: the model recomputes each row without left padding |

Sharing needs attention that accepts any mask. Copying needs ``past_key_values`` that can be copied:
models with sliding windows, flash attention or hybrid layers qualify, Mamba does not.

The preflight chooses the fastest way whose log-probs equal those of the model's plain forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from klrl.base.context import check_length, context_of
from klrl.kl.from_logits import tempered_log_softmax
from klrl.kl.reference import evaluating
from klrl.language.data.batch import Responses, make_batch
from klrl.language.model.causal_lm import (
    backbone,
    head,
    model_dtype,
    positions,
    sharing_refused,
    unwrapped,
)
from klrl.language.model.plain import choose_way, largest_error, packed, plain_states
from klrl.language.run.draws import choose, uniforms
from klrl.train.preflight import Check


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that end a response, and the pad id, which may be one of these."""

    eos: tuple[int, ...]
    pad: int


@dataclass(frozen=True)
class Decoding:
    """Settings for choosing tokens.

    Tokens are drawn from the whole softmax(logits / temperature). ``greedy``, for evaluation,
    takes the likeliest token instead; log-probs remain those of the softmax.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False


class Decoder(ABC):
    """Feeds N prompts to a model, then their responses token by token.

    ``prompt`` and ``mask`` [N, P] are left-padded; ``longest``: most tokens of a response.
    """

    #: Description of this way to sample, for messages.
    words: str
    #: Responses per row of the cache.
    width = 1

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        self.model, self.prompt, self.mask = model, prompt, mask.bool()
        self.group_size, self.longest = group_size, longest

    def start(self) -> Tensor:
        """Run the prompts; return the states [B, D] that predict the first response tokens."""
        states = self._prompts()
        self._spread()
        return states.repeat_interleave(self.group_size, 0)

    @abstractmethod
    def _prompts(self) -> Tensor:
        """Run the model on the prompts; return the states [N, D] at their last tokens."""

    @abstractmethod
    def _spread(self) -> None:
        """Prepare one cache row for each of a prompt's G responses, or one that all G share."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each of n responses; return the states [n, D] at these tokens."""

    def leave(self, alive: Tensor) -> Tensor | None:
        """Drop finished responses, if that drops :data:`_SPARE` of those that are decoded.

        ``alive`` [n], on the CPU, is False at finished responses. Return the indices of the
        responses that are still decoded, among which may be finished ones; None: all are.
        """
        groups = alive.unflatten(0, (-1, self.width))
        rows = groups.any(1).nonzero().squeeze(1)
        width = self._width_for(int(groups.sum(1).max()))
        if len(rows) * width > (1 - _SPARE) * len(alive):
            return None
        # Unfinished responses first, in their order, in each row of the cache.
        order = (~groups[rows]).long().argsort(dim=1, stable=True)[:, :width].sort(1).values
        if len(rows) < len(groups):
            self.keep(rows.to(self.prompt.device, non_blocking=True))
        if width < self.width:
            self._narrow(order.to(self.prompt.device, non_blocking=True))
        return (rows[:, None] * groups.shape[1] + order).flatten()

    def _width_for(self, alive: int) -> int:
        """Return the responses per row of the cache that at most ``alive`` unfinished ones need."""
        return self.width

    def _narrow(self, columns: Tensor) -> None:
        """Keep only the responses ``columns`` [rows, width] of each row of the cache."""
        raise AssertionError("a row of this cache has a single response")

    @abstractmethod
    def keep(self, alive: Tensor) -> None:
        """Keep only the rows of the cache with the indices ``alive``."""


class PromptCache(Decoder):
    """A decoder that computes each of the N prompts once, into a KV cache."""

    def _prompts(self) -> Tensor:
        position_ids = positions(self.mask)
        output = backbone(self.model)(
            input_ids=self.prompt,
            attention_mask=self.mask.long(),
            position_ids=position_ids,
            use_cache=True,
        )
        self.cache, self.position_ids = output.past_key_values, position_ids[:, -1:]
        states: Tensor = output.last_hidden_state[:, -1]
        return states

    def _feed(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Feed tokens [rows, width]; return the states [n, D] at these tokens."""
        self.position_ids = self.position_ids + 1
        output = backbone(self.model)(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=self.position_ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        states: Tensor = output.last_hidden_state.flatten(0, 1)
        return states


class SharedCache(PromptCache):
    """One row per prompt: the prompt's keys, then the keys of the G tokens of each step."""

    words = "cache shared by a prompt's responses"

    def _spread(self) -> None:
        self.width, self.slots = self.group_size, self.prompt.shape[1]
        self.bias = self._bias(self.mask[:, None].expand(-1, self.width, -1), self.longest)
        self.position_ids = self.position_ids.expand(-1, self.width)

    def _bias(self, visible: Tensor, steps: int) -> Tensor:
        """Return the bias [N, 1, width, slots] of what is ``visible``, and of ``steps`` more."""
        dtype, device = model_dtype(self.model), self.prompt.device
        itself = torch.eye(self.width, dtype=torch.bool, device=device).repeat(1, steps)
        visible = torch.cat([visible, itself.expand(len(visible), -1, -1)], 2)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device)
        return bias.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each response; the G tokens of a prompt form a row."""
        self.slots += self.width
        return self._feed(tokens.unflatten(0, (-1, self.width)), self.bias[..., : self.slots])

    def keep(self, alive: Tensor) -> None:
        """Keep the prompts that have an unfinished response."""
        self.cache.batch_select_indices(alive)
        self.bias, self.position_ids = self.bias[alive], self.position_ids[alive]

    def _width_for(self, alive: int) -> int:
        return alive

    def _narrow(self, columns: Tensor) -> None:
        # The keys of dropped responses stay in the cache; no later token sees them.
        steps = (self.bias.shape[-1] - self.slots) // self.width
        chosen = columns[:, None, :, None].expand(-1, 1, -1, self.slots)
        visible = self.bias[..., : self.slots].gather(2, chosen).squeeze(1) == 0
        self.width = columns.shape[1]
        self.position_ids = self.position_ids.gather(1, columns)
        self.bias = self._bias(visible, steps)


class CopiedCache(PromptCache):
    """One row per response, with its own copy of the prompt's cache."""

    words = "cache copied per response"

    def _spread(self) -> None:
        count, device = len(self.prompt), self.prompt.device
        of_prompt = torch.arange(count, device=device).repeat_interleave(self.group_size)
        self.cache.reorder_cache(of_prompt)
        self.mask, self.position_ids = self.mask.long()[of_prompt], self.position_ids[of_prompt]

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each response, in its own row."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        return self._feed(tokens[:, None], self.mask)

    def keep(self, alive: Tensor) -> None:
        """Keep the unfinished responses."""
        self.cache.reorder_cache(alive)
        self.mask, self.position_ids = self.mask[alive], self.position_ids[alive]


class Recomputed(Decoder):
    """One row per response, without left padding; for each new token, the whole row is recomputed.

    The cost grows with the square of the length. Any causal model can be sampled this way.
    """

    words = "no cache: each token recomputes its whole row"

    def _prompts(self) -> Tensor:
        self.lengths = self.mask.sum(1)
        self.tokens = packed(self.prompt, self.mask)[:, : int(self.lengths.max())]
        return self._last()

    def _spread(self) -> None:
        self.tokens = self.tokens.repeat_interleave(self.group_size, 0)
        self.lengths = self.lengths.repeat_interleave(self.group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each response, and recompute all rows."""
        room = nn.functional.pad(self.tokens, (0, 1))
        self.tokens = room.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self._last()

    def keep(self, alive: Tensor) -> None:
        """Keep the unfinished responses."""
        self.tokens, self.lengths = self.tokens[alive], self.lengths[alive]

    def _last(self) -> Tensor:
        states = plain_states(self.model, self.tokens)
        return states[torch.arange(len(states), device=states.device), self.lengths - 1]


#: Finished responses leave the batch once this share of it can leave; to leave costs a copy of the
#: cache.
_SPARE = 1 / 8

#: Name -> decoder; the fastest first.
WAYS: dict[str, type[Decoder]] = {
    "shared": SharedCache,
    "copied": CopiedCache,
    "plain": Recomputed,
}


#: (step, indices of n responses, their new tokens [n]) -> [n] bool: whether each response ends.
Ends: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]


class CacheSampler:
    """Samples token by token, in one of :data:`WAYS`, which :meth:`self_check` chooses.

    ``way``: None takes the fastest that the model's config allows. ``keep_states``: return the
    hidden states that predict the tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        special: SpecialTokens,
        *,
        way: str | None = None,
        keep_states: bool = False,
    ) -> None:
        self.model, self.special, self.keep_states = model, special, keep_states
        self._unshared = sharing_refused(model) if way is None else None
        self.way = way or ("shared" if self._unshared is None else "copied")

    @torch.no_grad()
    def __call__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        group_size: int,
        decoding: Decoding,
        seed: int = 0,
        first: int = 0,
    ) -> Responses:
        """Sample G responses for each of N left-padded prompts [N, P]: N x G rows.

        ``prompt_mask`` [N, P] is nonzero at real tokens. ``seed`` and the prompt's number, which is
        ``first`` for the first prompt, select a response's random numbers (:func:`uniforms`).
        Log-probs are those of softmax(logits / temperature), even if decoding is greedy.

        Raises:
            ValueError: the longest prompt plus ``max_new_tokens`` exceeds the model's context.
        """
        longest = int(prompt_mask.bool().sum(1).max()) + decoding.max_new_tokens
        check_length(unwrapped(self.model), longest)
        eos = torch.tensor(self.special.eos, device=prompt.device)

        def ends(step: int, rows: Tensor, chosen: Tensor) -> Tensor:
            return torch.isin(chosen, eos)

        with evaluating(self.model):
            return self._decode((prompt, prompt_mask), group_size, decoding, ends, seed, first)

    def without_states(self) -> CacheSampler:
        """Return a sampler that uses the same way, but does not return hidden states."""
        return CacheSampler(self.model, self.special, way=self.way)

    @torch.no_grad()
    def self_check(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> Check:
        """Switch to the fastest way that reproduces the plain forward's log-probs of a few tokens.

        The current way is tried first, then slower ways. The check's detail says why faster ways
        were rejected.

        Raises:
            ValueError: each way fails or has wrong log-probs.
        """
        few = prompt[:4], prompt_mask[:4]
        if len(prompt) == 1:
            few = prompt.repeat(2, 1), prompt_mask.repeat(2, 1)
        context, longest = context_of(unwrapped(self.model).config), int(few[1].bool().sum(1).max())
        room = 4 if context is None else context - longest
        decoding = Decoding(max_new_tokens=max(1, min(4, room)))

        def ends(step: int, rows: Tensor, chosen: Tensor) -> Tensor:
            # End the first prompt's responses after two tokens, then half of each group, to test
            # the removal of prompts and of responses.
            half = rows % group_size < group_size // 2
            return ((rows < group_size) & (step == 1)) | (half & (step == 2))

        def off(way: str) -> float:
            self.way = way
            with evaluating(self.model):
                sampled = self._decode(few, group_size, decoding, ends)
            return largest_error(self.model, make_batch(*few, sampled, group_size), group_size)

        unshared = [] if self._unshared is None else [f"not shared: {self._unshared}"]
        slower = list(WAYS)[list(WAYS).index(self.way) :]
        ways = {name: WAYS[name].words for name in slower}
        self.way, check = choose_way(self.model, "to sample", ways, off, unshared)
        return check

    def _decode(
        self,
        prompts: tuple[Tensor, Tensor],
        group_size: int,
        decoding: Decoding,
        ends: Ends,
        seed: int = 0,
        first: int = 0,
    ) -> Responses:
        """Sample N x G responses; ``rows`` are the indices of those that are still decoded."""
        pad, longest = self.special.pad, decoding.max_new_tokens
        decoder = WAYS[self.way](self.model, *prompts, group_size, longest)
        states = decoder.start()
        size, device = states.shape[0], states.device
        rows = torch.arange(size, device=device)
        if not decoding.greedy:
            numbers = range(first * group_size, first * group_size + size)
            uniform = uniforms(seed, numbers, group_size, longest).to(device)
        tokens = torch.full((size, longest), pad, device=device)
        mask = torch.zeros(size, longest, dtype=torch.bool, device=device)
        log_probs = torch.zeros(size, longest, device=device)
        kept = states.new_zeros(size, longest * self.keep_states, states.shape[-1])
        ended = torch.zeros(size, dtype=torch.bool, device=device)
        to_logits = head(self.model)
        for step in range(longest):
            log_p = tempered_log_softmax(to_logits(states), decoding.temperature)
            if step == 0:
                log_probs = log_probs.to(log_p.dtype)
            chosen = log_p.argmax(-1) if decoding.greedy else choose(log_p, uniform[rows, step])
            alive = ~ended[rows]
            chosen = chosen.where(alive, pad)
            mask[rows, step] = alive
            tokens[rows, step] = chosen
            log_prob = log_p.gather(-1, chosen[:, None]).squeeze(-1)
            log_probs[rows, step] = log_prob.masked_fill(~alive, 0.0)
            if self.keep_states:
                kept[rows, step] = states
            ended[rows] |= ends(step, rows, chosen) & alive
            unfinished = (~ended[rows]).cpu()  # the loop's only wait for the GPU
            if step == longest - 1 or not unfinished.any():
                break
            if (stay := decoder.leave(unfinished)) is not None:
                stay = stay.to(device, non_blocking=True)
                rows, chosen = rows[stay], chosen[stay]
            states = decoder.step(chosen)
        used = step + 1
        return Responses(
            tokens=tokens[:, :used],
            mask=mask[:, :used],
            log_probs=log_probs[:, :used],
            truncated=~ended,
            states=kept[:, :used].contiguous() if self.keep_states else None,
        )
