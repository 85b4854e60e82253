"""A rollout that several processes of torchrun share: each owns equally many of its prompts.

A process samples, scores and learns from its own prompts, and holds their hidden states. All other
entries, a few numbers per token, are gathered, and are equal in all processes. With one process,
which owns all prompts, each function here returns its argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import pad

from klrl.base import ranks
from klrl.language.data.batch import take_prompts
from klrl.language.data.prompts import PromptBatch

#: The row of each response in a rollout that processes share [B]; and this process's rows of the
#: rollout, with their hidden states, as one object that is not indexed with the batch.
ROW, _OWN = "row", "own"
Key: TypeAlias = str | tuple[str, ...]


def own_part(count: int) -> slice:
    """Return the part of ``count`` prompts, or rows, that this process owns; parts are equal."""
    size = count // ranks.world()
    return slice(ranks.rank() * size, (ranks.rank() + 1) * size)


def own_prompts(prompts: PromptBatch) -> tuple[PromptBatch, int]:
    """Return the prompts that this process owns, and the number of the first one."""
    own = own_part(len(prompts.prompts))
    return PromptBatch(prompts.ids[own], prompts.mask[own], prompts.prompts[own]), own.start


def spread(own: TensorDict, states: Sequence[Key]) -> TensorDict:
    """Gather a rollout [B] of each process's own responses; gather no ``states``.

    Without ``states`` all processes have all rows whole, for a checkpoint.
    """
    if ranks.world() == 1:
        return own
    lengths = ranks.gathered(own["tokens", "response"].shape[1])
    own = _longer(own, max(lengths) - lengths[ranks.rank()])
    batch = _gathered(own.exclude(*states))
    batch[ROW] = torch.arange(len(batch), device=batch.device)
    own[ROW] = batch[ROW][own_part(len(batch))]
    return batch.set_non_tensor(_OWN, own) if states else batch


def own_rows(batch: TensorDictBase, states: Iterable[Key]) -> TensorDictBase:
    """Return this process's rows of a rollout [B], with their hidden states.

    If the rollout has ``states`` of all rows, it keeps those of no other process. A batch that no
    other process shares is returned whole.
    """
    if ROW not in batch.keys():
        return batch
    if _OWN not in batch.keys():
        own = batch[own_part(len(batch))].clone()
        for key in states:
            batch.pop(key, None)
        batch.set_non_tensor(_OWN, own)
    rows: TensorDictBase = batch[_OWN]
    return rows


def share(batch: TensorDictBase, own: TensorDictBase, keys: Iterable[Key]) -> None:
    """Write entries of each process's ``own`` rows into the rollout [B]."""
    if own is not batch:
        batch.update(_gathered(own.select(*keys, strict=False)))


def take(batch: TensorDictBase, prompts: Tensor, group_size: int) -> TensorDictBase:
    """Return the rows of these prompts of ``batch``, all its own, with their hidden states."""
    part = take_prompts(batch, prompts, group_size)
    if ROW not in batch.keys():
        return part
    own: TensorDictBase = batch[_OWN]
    held = own.exclude(*part.keys(include_nested=True, leaves_only=True))
    return part.exclude(_OWN).update(held[part[ROW] - own[ROW][0]])


def _longer(own: TensorDict, more: int) -> TensorDict:
    """Extend the responses of a rollout, before it has scores, by ``more`` positions of padding."""
    longer = own.copy()
    for key in own.keys(include_nested=True, leaves_only=True):
        if key != ("tokens", "prompt") and key[0] != "next":
            value = own[key]
            longer[key] = pad(value, (0, 0) * (value.ndim - 2) + (0, more))
    return longer


def _gathered(own: TensorDictBase) -> TensorDict:
    """Concatenate the rows of all processes."""
    parts = ranks.gathered(own.cpu().to_dict())
    return torch.cat([TensorDict(each, len(own)) for each in parts]).to(own.device)
