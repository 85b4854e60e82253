"""Sampling responses: the protocol, its settings, and klrl's own loop over a KV cache.

What the cache holds, and why there are two kinds, stands in :mod:`klrl.language.decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from klrl.language.batch import Responses, make_batch
from klrl.language.causal_lm import (
    head,
    model_dtype,
    plain,
    sharing_refused,
)
from klrl.language.decoder import CopiedCache, Decoder, SharedCache
from klrl.language.scoring import AGREEMENT, padded_states
from klrl.language.vocabulary import NextTokens, response_log_probs, tempered_log_softmax
from klrl.transforms.token_log_probs import check_length, evaluating


@dataclass(frozen=True)
class SpecialTokens:
    """What ends a response, and what fills the rest of its row.

    Attributes:
        eos: ids that end a response; several for some chat models.
        pad: any id, an EOS too: nothing is found by it.
    """

    eos: tuple[int, ...]
    pad: int


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: R at most.
        temperature: training draws from softmax(logits / temperature).
        greedy: the likeliest token; for evaluation only.
        top_k: among the k likeliest; for evaluation only.
        top_p: among the fewest tokens that hold this probability; for evaluation only.
        training: whether the responses are learned from.

    Raises:
        ValueError: a value out of range, or a truncated distribution in training.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    top_k: int | None = None
    top_p: float | None = None
    training: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: at least 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: must be above 0; see greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: above 0, at most 1")
        for name in ("greedy", "top_k", "top_p"):
            value = getattr(self, name)
            if self.training and value not in (None, False):
                raise ValueError(
                    f"{name}={value}: training samples from the whole softmax, a truncated "
                    "distribution has no KL to the reference; use it in evaluation"
                )


class Sampler(Protocol):
    """Produces responses."""

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
            whatever evaluation truncates.

        Raises:
            ValueError: prompt and response do not fit the model's context.
        """
        ...


class CacheSampler:
    """Sampling with a KV cache.

    Args:
        model: a causal LM.
        special: EOS and pad.
        shared: keep the G responses of a prompt in one row; None to decide by the model's settings.
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
        check_length(plain(self.model), longest)
        kind = SharedCache if self.shared else CopiedCache
        with evaluating(self.model):
            decoder = kind(self.model, prompt, prompt_mask, group_size, decoding.max_new_tokens)
            return _decode(decoder, self, decoding, generator)

    def self_check(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> str:
        """Sample a few tokens, score them padded; leave the shared rows where the two differ.

        Returns:
            One line: how the sampler goes on, and why.

        Raises:
            ValueError: copied rows differ as well: this model's cache cannot be used.
        """
        bound = AGREEMENT[model_dtype(self.model)]
        off = self._off(prompt, prompt_mask, group_size)
        if off > bound and self.shared:
            self.shared, wrong = False, off
            off = self._off(prompt, prompt_mask, group_size)
            if off <= bound:
                return f"cache copied per response: sharing is {wrong:.2g} nats off"
        if not off <= bound:
            raise ValueError(
                f"sampled log-probs are {off:.2g} nats off recomputed ones (at most {bound:g})"
            )
        how = "shared by a prompt's responses" if self.shared else "copied per response"
        return f"cache {how}: {off:.2g} nats off recomputed log-probs, at most {bound:g}"

    @torch.no_grad()
    def _off(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> float:
        few = prompt[:4], prompt_mask[:4]
        generator = torch.Generator(prompt.device).manual_seed(0)
        found = self(*few, group_size, Decoding(max_new_tokens=4), generator)
        batch = make_batch(*few, found, group_size)
        states = padded_states(self.model, batch)
        scored = response_log_probs(NextTokens(states, head(self.model)), found.tokens, found.mask)
        return float((scored - found.log_probs).abs().max())


def _decode(
    decoder: Decoder,
    sampler: CacheSampler,
    decoding: Decoding,
    generator: torch.Generator | None,
) -> Responses:
    """Token by token until every row has ended; B = N x G rows, ``rows`` those still computed."""
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
        table = tempered_log_softmax(to_logits(states), decoding.temperature)
        if step == 0:
            log_probs = log_probs.to(table.dtype)
        chosen = _choose(table, decoding, generator)
        going = ~ended[rows]
        chosen = chosen.where(going, special.pad)
        mask[rows, step] = going
        tokens[rows, step] = chosen
        said = table.gather(-1, chosen[:, None]).squeeze(-1)
        log_probs[rows, step] = said.masked_fill(~going, 0.0)
        if sampler.keep_states:
            kept.append(states.new_zeros(size, states.shape[-1]).index_copy_(0, rows, states))
        ended[rows] |= torch.isin(chosen, eos) & going
        done = ended[rows].unflatten(0, (-1, decoder.width)).all(1)
        if step == longest - 1 or bool(done.all()):
            break
        if int(done.sum()) * 4 >= done.numel():
            alive = (~done).nonzero().squeeze(-1)
            decoder.keep(alive)
            rows = rows.unflatten(0, (-1, decoder.width))[alive].flatten()
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


def _choose(table: Tensor, decoding: Decoding, generator: torch.Generator | None) -> Tensor:
    """One token per row from log-probs [rows, V]."""
    if decoding.greedy:
        return table.argmax(-1)
    probs = _truncate(table.exp(), decoding)
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def _truncate(probs: Tensor, decoding: Decoding) -> Tensor:
    """Zero what top-k and top-p leave out; the rest is not renormalised."""
    if decoding.top_k is not None and decoding.top_k < probs.shape[-1]:
        least = probs.topk(decoding.top_k, -1).values[:, -1:]
        probs = probs.masked_fill(probs < least, 0.0)
    if decoding.top_p is not None and decoding.top_p < 1:
        probs = probs / probs.sum(-1, keepdim=True)
        ordered, index = probs.sort(-1, descending=True)
        # A token stays while those before it hold less than top_p: the first always does.
        outside = ordered.cumsum(-1) - ordered >= decoding.top_p
        probs = torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(outside, 0.0))
    return probs
