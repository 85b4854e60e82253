"""How a model is fed token by token: three ways, from the fastest to the one that every family can.

| way | a prompt is computed | then |
|---|---|---|
| shared | once for its G responses | they share one row, their keys behind one copy of its own |
| copied | once for its G responses | each has a row and a copy of the prompt's keys or states |
| plain | again for every token | the whole row is computed anew; no cache, no padding before it |

Sharing needs attention that takes any mask. Copying needs ``past_key_values`` that can be copied:
sliding windows, flash attention and hybrid models have them, Mamba has not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from klrl.language.model.causal_lm import backbone, model_dtype, positions
from klrl.language.model.plain import packed, plain_states


class Decoder(ABC):
    """A model that is fed N prompts and then their responses, token by token.

    Args:
        model: a causal LM.
        prompt: [N, P], left-padded.
        mask: [N, P], nonzero at real tokens.
        group_size: G.
        longest: most tokens of a response.
    """

    #: Responses that stand in one row.
    width = 1

    @abstractmethod
    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None: ...

    @abstractmethod
    def start(self) -> Tensor:
        """The states that predict the first tokens, [B, D]."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each of n responses; the states [n, D] after them."""

    @abstractmethod
    def keep(self, alive: Tensor) -> None:
        """Keep only these rows."""


class PromptCache(Decoder):
    """A KV cache of N prompts, each computed once."""

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


class SharedCache(PromptCache):
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


class CopiedCache(PromptCache):
    """A row is a response with its own copy of what the prompt left in the cache."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        super().__init__(model, prompt, mask, group_size, longest)
        of_prompt = torch.arange(len(prompt), device=prompt.device).repeat_interleave(group_size)
        self.cache.reorder_cache(of_prompt)
        self.mask = self.mask.long()[of_prompt]
        self.position_ids = self.position_ids[of_prompt]

    def step(self, tokens: Tensor) -> Tensor:
        """Feed every response."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        return self._feed(tokens[:, None], self.mask)

    def keep(self, alive: Tensor) -> None:
        """Keep the unfinished responses."""
        self.cache.reorder_cache(alive)
        self.mask, self.position_ids = self.mask[alive], self.position_ids[alive]


class Recomputed(Decoder):
    """A row is a response, packed to the left; the whole of it is computed for every token.

    Its cost grows with the square of the length. It asks nothing of a family but to be causal.
    """

    def __init__(
        self, model: nn.Module, prompt: Tensor, mask: Tensor, group_size: int, longest: int
    ) -> None:
        self.model, self.group_size = model, group_size
        self.lengths = mask.bool().sum(1)
        self.tokens = packed(prompt, mask.bool())[:, : int(self.lengths.max())]

    def start(self) -> Tensor:
        """The states that predict the first tokens, [B, D]: a prompt's G are the same."""
        states = self._last()
        self.tokens = self.tokens.repeat_interleave(self.group_size, 0)
        self.lengths = self.lengths.repeat_interleave(self.group_size, 0)
        return states.repeat_interleave(self.group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Compute every response with one more token."""
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


#: By name, the fastest first.
WAYS: dict[str, type[Decoder]] = {
    "shared": SharedCache,
    "copied": CopiedCache,
    "plain": Recomputed,
}
#: The same in words.
IN_WORDS = {
    "shared": "cache shared by a prompt's responses",
    "copied": "cache copied per response",
    "plain": "no cache: every token from its whole row",
}
