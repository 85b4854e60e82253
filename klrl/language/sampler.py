"""Sampling of responses: the protocol, its settings, and klrl's own loop over a KV cache.

A prompt is computed once for its G responses. Then the responses either share one row, their keys
behind one copy of the prompt's, or each gets a copy of the prompt's keys. Sharing is faster but
needs attention that takes any mask; copies also work with sliding windows and flash attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from klrl.kl.reference import evaluating
from klrl.language.batch import Responses, make_batch
from klrl.language.causal_lm import (
    backbone,
    head,
    model_dtype,
    positions,
    sharing_refused,
    unwrapped,
)
from klrl.language.scoring import AGREEMENT, padded_states
from klrl.language.vocabulary import NextTokens, response_log_probs, tempered_log_softmax
from klrl.train.preflight import Check
from klrl.transforms.token_log_probs import check_length


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that end a response, and the id that fills the rest of its row.

    Attributes:
        eos: ids that end a response; several for some chat models.
        pad: any id, even an EOS: padding is known by position, never by this id.
    """

    eos: tuple[int, ...]
    pad: int


@dataclass(frozen=True)
class Decoding:
    """Settings for choosing tokens.

    Attributes:
        max_new_tokens: largest R.
        temperature: tokens are drawn from the whole softmax(logits / temperature).
        greedy: take the likeliest token instead; for evaluation only, since such a policy has no
            KL to the reference.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False


class Sampler(Protocol):
    """Samples responses."""

    def __call__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        group_size: int,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Responses:
        """Sample G responses for each of N prompts.

        Args:
            prompt: [N, P] int64, left-padded.
            prompt_mask: [N, P], nonzero at real tokens.
            group_size: G.
            decoding: how tokens are chosen.
            generator: on the model's device; equal seeds give equal tokens. None for torch's own.

        Returns:
            N x G rows, those of a prompt together; log-probs are of softmax(logits / temperature),
            also where decoding is greedy.

        Raises:
            ValueError: prompt and response do not fit the model's context.
        """
        ...


class CacheSampler:
    """Sampling with a KV cache.

    Args:
        model: a causal LM.
        special: EOS and pad.
        shared: keep the G responses of a prompt in one row; None to decide by the model's config.
        keep_states: return the hidden states that the tokens were drawn from.
    """

    def __init__(
        self,
        model: nn.Module,
        special: SpecialTokens,
        *,
        shared: bool | None = None,
        keep_states: bool = False,
    ) -> None:
        self.model, self.special, self.keep_states = model, special, keep_states
        self.shared = sharing_refused(model) is None if shared is None else shared

    @torch.no_grad()
    def __call__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        group_size: int,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Responses:
        """As :class:`Sampler`."""
        longest = int(prompt_mask.bool().sum(1).max()) + decoding.max_new_tokens
        check_length(unwrapped(self.model), longest)
        kind = SharedCache if self.shared else CopiedCache
        with evaluating(self.model):
            decoder = kind(self.model, prompt, prompt_mask, group_size, decoding.max_new_tokens)
            return _decode(decoder, self, decoding, generator)

    def self_check(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> Check:
        """Compare sampled log-probs of a few tokens with padded ones; unshare rows if they differ.

        Returns:
            The check of the cache that the sampler uses from now on.

        Raises:
            ValueError: copied rows differ too: this model's cache cannot be used.
        """
        bound, detail = AGREEMENT[model_dtype(self.model)], ""
        off = self._largest_difference(prompt, prompt_mask, group_size)
        if off > bound and self.shared:
            self.shared, detail = False, f"sharing is {off:.3g} nats off"
            off = self._largest_difference(prompt, prompt_mask, group_size)
        if not off <= bound:
            raise ValueError(
                f"sampled log-probs are {off:.2g} nats off recomputed ones (at most {bound:g})"
            )
        how = "shared by a prompt's responses" if self.shared else "copied per response"
        return Check(f"cache {how}, nats off recomputed log-probs", off, bound, detail)

    @torch.no_grad()
    def _largest_difference(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> float:
        """Largest |sampled - recomputed| log-prob, nats, on at most four prompts."""
        few = prompt[:4], prompt_mask[:4]
        generator = torch.Generator(prompt.device).manual_seed(0)
        sampled = self(*few, group_size, Decoding(max_new_tokens=4), generator)
        next_tokens = NextTokens(
            padded_states(self.model, make_batch(*few, sampled, group_size)), head(self.model)
        )
        recomputed = response_log_probs(next_tokens, sampled.tokens, sampled.mask)
        return float((recomputed - sampled.log_probs).abs().max())


def _decode(
    decoder: Decoder,
    sampler: CacheSampler,
    decoding: Decoding,
    generator: torch.Generator | None,
) -> Responses:
    """Sample token by token until all B = N x G rows end; ``rows`` are those still in the cache."""
    special, longest = sampler.special, decoding.max_new_tokens
    states = decoder.start()
    size, device = states.shape[0], states.device
    rows = torch.arange(size, device=device)
    eos = torch.tensor(special.eos, device=device)
    tokens = torch.full((size, longest), special.pad, device=device)
    mask = torch.zeros(size, longest, dtype=torch.bool, device=device)
    log_probs = torch.zeros(size, longest, device=device)
    kept: list[Tensor] = []
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    to_logits = head(sampler.model)
    for step in range(longest):
        log_p = tempered_log_softmax(to_logits(states), decoding.temperature)
        if step == 0:
            log_probs = log_probs.to(log_p.dtype)
        chosen = _choose(log_p, decoding, generator)
        alive = ~ended[rows]
        chosen = chosen.where(alive, special.pad)
        mask[rows, step] = alive
        tokens[rows, step] = chosen
        log_prob = log_p.gather(-1, chosen[:, None]).squeeze(-1)
        log_probs[rows, step] = log_prob.masked_fill(~alive, 0.0)
        if sampler.keep_states:
            kept.append(states.new_zeros(size, states.shape[-1]).index_copy_(0, rows, states))
        ended[rows] |= torch.isin(chosen, eos) & alive
        done = ended[rows].unflatten(0, (-1, decoder.width)).all(1)
        if step == longest - 1 or bool(done.all()):
            break
        if int(done.sum()) * 4 >= done.numel():
            unfinished = (~done).nonzero().squeeze(-1)
            decoder.keep(unfinished)
            rows = rows.unflatten(0, (-1, decoder.width))[unfinished].flatten()
            chosen = tokens[rows, step]
        states = decoder.step(chosen)
    used = step + 1
    return Responses(
        tokens=tokens[:, :used],
        mask=mask[:, :used],
        log_probs=log_probs[:, :used],
        truncated=~ended,
        states=torch.stack(kept, 1) if sampler.keep_states else None,
    )


def _choose(log_p: Tensor, decoding: Decoding, generator: torch.Generator | None) -> Tensor:
    """One token per row from log-probs [rows, V]."""
    if decoding.greedy:
        return log_p.argmax(-1)
    return torch.multinomial(log_p.exp(), 1, generator=generator).squeeze(-1)


# ---------------------------------------------------------------------------------------- the cache


class Decoder(ABC):
    """A model and its KV cache, which holds N prompts; ``width`` responses stand in a row of it."""

    width = 1

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        self.network, self.group_size = backbone(model), group_size
        self.dtype = model_dtype(model)
        self.mask = mask.bool()
        position_ids = positions(self.mask)
        output = self.network(
            input_ids=prompt,
            attention_mask=self.mask.long(),
            position_ids=position_ids,
            use_cache=True,
        )
        self.cache = output.past_key_values
        self.position_ids = position_ids[:, -1:]
        self.last = output.last_hidden_state[:, -1]

    def start(self) -> Tensor:
        """The states that predict the first tokens, [N, D] -> [B, D]: a prompt's G are the same."""
        return self.last.repeat_interleave(self.group_size, 0)

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each of n responses in the cache; the states [n, D] after them."""

    def _feed(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """The states [n, D] after tokens [rows, width]."""
        self.position_ids = self.position_ids + 1
        output = self.network(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=self.position_ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state.flatten(0, 1)

    @abstractmethod
    def keep(self, alive: Tensor) -> None:
        """Keep only these rows of the cache."""


class SharedCache(Decoder):
    """A row is a prompt; its keys are [prompt | first tokens of r1 .. rG | second tokens | ..]."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        super().__init__(model, prompt, mask, group_size, longest)
        self.width = group_size
        self.slots = prompt.shape[1]
        to_itself = torch.eye(group_size, dtype=torch.bool, device=prompt.device).repeat(1, longest)
        to_itself = to_itself.expand(len(prompt), -1, -1)
        visible = torch.cat([self.mask[:, None].expand(-1, group_size, -1), to_itself], 2)
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=prompt.device)
        self.bias = bias.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)
        self.position_ids = self.position_ids.expand(-1, group_size)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed the G responses of each prompt."""
        self.slots += self.width
        return self._feed(tokens.unflatten(0, (-1, self.width)), self.bias[..., : self.slots])

    def keep(self, alive: Tensor) -> None:
        """Keep the prompts that have an unfinished response."""
        self.cache.batch_select_indices(alive)
        self.bias, self.position_ids = self.bias[alive], self.position_ids[alive]


class CopiedCache(Decoder):
    """A row is a response with its own copy of the prompt's keys."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        super().__init__(model, prompt, mask, group_size, longest)
        self.cache.batch_repeat_interleave(group_size)
        self.mask = self.mask.long().repeat_interleave(group_size, 0)
        self.position_ids = self.position_ids.repeat_interleave(group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed every response."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        return self._feed(tokens[:, None], self.mask)

    def keep(self, alive: Tensor) -> None:
        """Keep the unfinished responses."""
        self.cache.batch_select_indices(alive)
        self.mask, self.position_ids = self.mask[alive], self.position_ids[alive]
