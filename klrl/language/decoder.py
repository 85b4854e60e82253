"""A causal LM and its KV cache, one token of every response at a time.

A prompt is computed once for its G responses. Then either they go on as one row, their keys behind
one copy of the prompt's, or each gets a copy of the prompt's keys. The first is faster where
attention takes any mask; the second serves sliding windows and flash attention.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from klrl.language.causal_lm import backbone, model_dtype, positions


class Decoder(Protocol):
    """A model and its cache; ``width`` responses to a row of the cache."""

    width: int

    def start(self) -> Tensor:
        """The states [B, D] that predict the first tokens."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each response still computed; the states that predict the next."""
        ...

    def keep(self, alive: Tensor) -> None:
        """Go on with these rows of the cache only."""
        ...


class _Prompts:
    """N prompts, computed once into a cache."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        self.network, self.group_size, self.longest = backbone(model), group_size, longest
        self.dtype = model_dtype(model)
        self.mask = mask.bool()
        place = positions(self.mask)
        output = self.network(
            input_ids=prompt,
            attention_mask=self.mask.long(),
            position_ids=place,
            use_cache=True,
        )
        self.cache = output.past_key_values
        self.place = place[:, -1:]
        self.last = output.last_hidden_state[:, -1]

    def start(self) -> Tensor:
        """[N, D] -> [B, D]: the G responses of a prompt start from the same state."""
        return self.last.repeat_interleave(self.group_size, 0)


class SharedCache(_Prompts):
    """A row is a prompt; its keys are [prompt | first tokens of r1 .. rG | second tokens | ..]."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        super().__init__(model, prompt, mask, group_size, longest)
        self.width = group_size
        self.seen = prompt.shape[1]
        own = torch.eye(group_size, dtype=torch.bool, device=prompt.device).repeat(1, longest)
        own = own.expand(len(prompt), -1, -1)
        visible = torch.cat([self.mask[:, None].expand(-1, group_size, -1), own], 2)
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=prompt.device)
        self.bias = bias.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)
        self.place = self.place.expand(-1, group_size)

    def step(self, tokens: Tensor) -> Tensor:
        """[n x G] -> [n x G, D]."""
        self.place = self.place + 1
        self.seen += self.width
        output = self.network(
            input_ids=tokens.unflatten(0, (-1, self.width)),
            attention_mask=self.bias[..., : self.seen],
            position_ids=self.place,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state.flatten(0, 1)

    def keep(self, alive: Tensor) -> None:
        """Prompts of which some response goes on."""
        self.cache.batch_select_indices(alive)
        self.bias, self.place = self.bias[alive], self.place[alive]


class CopiedCache(_Prompts):
    """A row is a response with its own copy of the prompt's keys."""

    width = 1

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        super().__init__(model, prompt, mask, group_size, longest)
        self.cache.batch_repeat_interleave(group_size)
        self.mask = self.mask.long().repeat_interleave(group_size, 0)
        self.place = self.place.repeat_interleave(group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """[n] -> [n, D]."""
        self.place = self.place + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        output = self.network(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.place,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    def keep(self, alive: Tensor) -> None:
        """Responses that go on."""
        self.cache.batch_select_indices(alive)
        self.mask, self.place = self.mask[alive], self.place[alive]
