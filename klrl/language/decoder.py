"""A causal LM and its KV cache, one token of every response at a time.

A prompt is computed once for its G responses. Then the responses either share one row, their keys
behind one copy of the prompt's, or each gets a copy of the prompt's keys. Sharing is faster but
needs attention that takes any mask; copies also work with sliding windows and flash attention.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from klrl.language.causal_lm import backbone, model_dtype, positions


class Decoder(Protocol):
    """A model and its KV cache; ``width`` is the number of responses in a row of the cache."""

    width: int

    def start(self) -> Tensor:
        """The states [B, D] that predict the first tokens."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each response in the cache; the states that predict the next ones."""
        ...

    def keep(self, alive: Tensor) -> None:
        """Keep only these rows of the cache."""
        ...


class _Prompts:
    """Computes N prompts once into a cache."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        self.network, self.group_size, self.longest = backbone(model), group_size, longest
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
        """[N, D] -> [B, D]: the G responses of a prompt start from the same state."""
        return self.last.repeat_interleave(self.group_size, 0)


class SharedCache(_Prompts):
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
        """[n x G] -> [n x G, D]."""
        self.position_ids = self.position_ids + 1
        self.slots += self.width
        output = self.network(
            input_ids=tokens.unflatten(0, (-1, self.width)),
            attention_mask=self.bias[..., : self.slots],
            position_ids=self.position_ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state.flatten(0, 1)

    def keep(self, alive: Tensor) -> None:
        """Keep the prompts that have an unfinished response."""
        self.cache.batch_select_indices(alive)
        self.bias, self.position_ids = self.bias[alive], self.position_ids[alive]


class CopiedCache(_Prompts):
    """A row is a response with its own copy of the prompt's keys."""

    width = 1

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        super().__init__(model, prompt, mask, group_size, longest)
        self.cache.batch_repeat_interleave(group_size)
        self.mask = self.mask.long().repeat_interleave(group_size, 0)
        self.position_ids = self.position_ids.repeat_interleave(group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """[n] -> [n, D]."""
        self.position_ids = self.position_ids + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        output = self.network(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.position_ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    def keep(self, alive: Tensor) -> None:
        """Keep the unfinished responses."""
        self.cache.batch_select_indices(alive)
        self.mask, self.position_ids = self.mask[alive], self.position_ids[alive]
