"""A rollout that several processes of torchrun share: each owns equally many of its prompts.

A process samples, scores and learns from its own prompts, and holds their hidden states. All other
entries, a few numbers per token, are gathered, and are equal in all processes. With one process,
which owns all prompts, each function here returns its argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import pad

from klrl.base import ranks
from klrl.language.data.batch import take_prompts
from klrl.language.data.prompts import PromptBatch

#: The row of each response in its rollout [B]; only if several processes share the rollout.
ROW = "row"
Key: TypeAlias = str | tuple[str, ...]


def own_part(count: int) -> slice:
    """Return the part of ``count`` prompts, or rows, that this process owns; parts are equal."""
    size = count // ranks.world()
    return slice(ranks.rank() * size, (ranks.rank() + 1) * size)


def own_prompts(prompts: PromptBatch) -> tuple[PromptBatch, int]:
    """Return the prompts that this process owns, and the number of the first one."""
    own = own_part(len(prompts.prompts))
    return PromptBatch(prompts.ids[own], prompts.mask[own], prompts.prompts[own]), own.start


class Shares:
    """The part of the latest rollout that this process owns, with its hidden states."""

    def __init__(self) -> None:
        self._own: TensorDictBase

    def spread(self, own: TensorDict, states: Iterable[Key]) -> TensorDictBase:
        """Gather a rollout [B] of each process's own responses, without the entries ``states``."""
        if ranks.world() == 1:
            return own
        lengths = ranks.gathered(own["tokens", "response"].shape[1])
        self._own = _longer(own, max(lengths) - lengths[ranks.rank()])
        batch = _gathered(self._own.exclude(*states))
        batch[ROW] = torch.arange(len(batch), device=batch.device)
        self._own[ROW] = batch[ROW][own_part(len(batch))]
        return batch

    def own(self, batch: TensorDictBase) -> TensorDictBase:
        """Return this process's rows of a rollout [B], with their hidden states.

        A batch that no other process shares is returned whole.
        """
        return self._own if ROW in batch.keys() else batch

    def share(self, batch: TensorDictBase, own: TensorDictBase, keys: Iterable[Key]) -> None:
        """Write entries of each process's ``own`` rows into ``batch`` [B]."""
        if own is not batch:
            batch.update(_gathered(own.select(*keys, strict=False)))

    def take(self, batch: TensorDictBase, prompts: Tensor, group_size: int) -> TensorDictBase:
        """Return the rows of these prompts of ``batch``, all its own, with their hidden states."""
        part = take_prompts(batch, prompts, group_size)
        if ROW not in batch.keys():
            return part
        rows = part[ROW] - self._own[ROW][0]
        held = self._own.exclude(*batch.keys(include_nested=True, leaves_only=True))
        return part.update(held[rows])


def _longer(own: TensorDict, more: int) -> TensorDict:
    """Extend the responses of a rollout, before it has scores, by ``more`` positions of padding."""
    longer = own.copy()
    for key in own.keys(include_nested=True, leaves_only=True):
        if key != ("tokens", "prompt") and key[0] != "next":
            value = own[key]
            longer[key] = pad(value, (0, 0) * (value.ndim - 2) + (0, more))
    return longer


def _gathered(own: TensorDictBase) -> TensorDictBase:
    """Concatenate the rows of all processes."""
    parts = ranks.gathered(own.cpu().to_dict())
    return torch.cat([TensorDict(each, len(own)) for each in parts]).to(own.device)
