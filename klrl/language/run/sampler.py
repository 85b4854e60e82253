"""Sampling of responses: its settings, and klrl's own loop, token by token.

How the model is fed, with which cache, is in ``model/decoders.py``. The preflight takes the
fastest way that gives the model's own log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.kl.from_logits import tempered_log_softmax
from klrl.kl.reference import evaluating
from klrl.language.data.batch import Responses, make_batch
from klrl.language.model.causal_lm import head, model_dtype, sharing_refused, unwrapped
from klrl.language.model.decoders import IN_WORDS, WAYS, Decoder
from klrl.language.model.plain import (
    AGREEMENT,
    FAMILY_ERRORS,
    few_tokens,
    off_and_bound,
    off_plain,
    reason_of,
)
from klrl.train.preflight import Check


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that end a response, and the id that fills the rest of its row; any, even an EOS."""

    eos: tuple[int, ...]
    pad: int


@dataclass(frozen=True)
class Decoding:
    """Settings for choosing tokens.

    Tokens are drawn from the whole softmax(logits / temperature); or ``greedy``, for evaluation
    alone, since such a policy has no KL to the reference.
    """

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False


#: (step, rows [n], their tokens [n]) -> [n] bool: which responses end with it.
Ends: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]


class CacheSampler:
    """Sampling token by token, in the fastest of :data:`WAYS` that is right.

    Args:
        model: a causal LM.
        special: EOS and pad.
        way: shared, copied or plain; None to begin with what the model's config allows.
        keep_states: return the hidden states that the tokens were drawn from.
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
        longest = int(prompt_mask.bool().sum(1).max()) + decoding.max_new_tokens
        check_length(unwrapped(self.model), longest)
        eos = torch.tensor(self.special.eos, device=prompt.device)
        return self._sample(
            (prompt, prompt_mask),
            group_size,
            decoding,
            generator,
            lambda step, rows, chosen: torch.isin(chosen, eos),
        )

    def without_states(self) -> CacheSampler:
        """The same sampler for evaluations, which keep no states."""
        return CacheSampler(self.model, self.special, way=self.way)

    @torch.no_grad()
    def self_check(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> Check:
        """Sample a few tokens, compare their log-probs with plain ones, and settle how to sample.

        A way that fails or is wrong gives way to the next, slower one.

        Returns:
            The check of the way that is taken from now on, with what was wrong with faster ones.

        Raises:
            ValueError: none is right: this family cannot be sampled.
        """
        bound = AGREEMENT[model_dtype(self.model)]
        wrong = [] if self._unshared is None else [f"not shared: {self._unshared}"]
        names = list(WAYS)
        for way in names[names.index(self.way) :]:
            self.way = way
            try:
                off, bound = off_and_bound(
                    self.model, lambda: self._largest_difference(prompt, prompt_mask, group_size)
                )
            except FAMILY_ERRORS as error:
                wrong.append(f"{way}: {reason_of(error)}")
                continue
            if off <= bound:
                name = f"{IN_WORDS[way]}, nats off plain log-probs"
                return Check(name, off, bound, "; ".join(wrong))
            wrong.append(f"{way}: {off:.3g} nats off")
        raise ValueError(
            f"{type(unwrapped(self.model)).__name__}: no way to sample gives its own log-probs to "
            f"{bound:g} nats ({'; '.join(wrong)}); choose another model"
        )

    def _sample(
        self,
        prompts: tuple[Tensor, Tensor],
        group_size: int,
        decoding: Decoding,
        generator: torch.Generator | None,
        ends: Ends,
    ) -> Responses:
        with evaluating(self.model):
            decoder = WAYS[self.way](self.model, *prompts, group_size, decoding.max_new_tokens)
            return _decode(decoder, self, decoding, generator, ends)

    def _largest_difference(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> float:
        """Largest |sampled - plain| log-prob, nats, on at most four prompts."""
        few = prompt[:4], prompt_mask[:4]
        if len(prompt) == 1:
            few = prompt.repeat(2, 1), prompt_mask.repeat(2, 1)
        generator = torch.Generator(prompt.device).manual_seed(0)

        def ends(step: int, rows: Tensor, chosen: Tensor) -> Tensor:
            # The first prompt's responses end after two tokens: its rows leave the cache.
            return (rows < group_size) & (step == 1)

        decoding = Decoding(max_new_tokens=few_tokens(self.model, prompt_mask[:4]))
        sampled = self._sample(few, group_size, decoding, generator, ends)
        return off_plain(self.model, make_batch(*few, sampled, group_size), group_size)


def _decode(
    decoder: Decoder,
    sampler: CacheSampler,
    decoding: Decoding,
    generator: torch.Generator | None,
    ends: Ends,
) -> Responses:
    """Sample token by token until all B = N x G rows end; ``rows`` are those still in the cache."""
    special, longest = sampler.special, decoding.max_new_tokens
    states = decoder.start()
    size, device = states.shape[0], states.device
    rows = torch.arange(size, device=device)
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
        ended[rows] |= ends(step, rows, chosen) & alive
        done = ended[rows].unflatten(0, (-1, decoder.width)).all(1)
        if step == longest - 1:
            break
        left = [row for row, is_done in enumerate(done.tolist()) if not is_done]  # the only wait
        if not left:
            break
        if (done.numel() - len(left)) * 4 >= done.numel():
            unfinished = torch.tensor(left).to(device, non_blocking=True)
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
    # argmax p / q with q ~ Exp(1): torch.multinomial, less its checks, which wait for a GPU.
    p = log_p.exp()
    return p.div_(torch.empty_like(p).exponential_(generator=generator)).argmax(-1)
