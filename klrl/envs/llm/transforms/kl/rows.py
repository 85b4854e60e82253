"""Reads, pads and writes sequences of different lengths in a TensorDict.

TorchRL keeps the tokens of a batch in one of four ways: a dense tensor [B, T], a nested tensor, a
ragged stack of TensorDicts, or a plain list. klrl converts all four to lists of B rows [T_i, ...].
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from klrl.kl.policies import Key

#: Values of ``padding_side``.
SIDES = ("left", "right")
#: A tensor [B, T, ...], dense or nested; or a list of B tensors [T_i, ...].
Rows: TypeAlias = Tensor | list[Tensor]


def read_value(tensordict: TensorDictBase, key: Key) -> Rows | None:
    """Return the entry at ``key``: a tensor, or a list of B tensors if ragged; None if missing."""
    parts = key if isinstance(key, tuple) else (key,)
    node = tensordict
    for part in parts[:-1]:
        node = node.get(part, None)
        if not is_tensor_collection(node):
            return None
    value = node.get(parts[-1], None, as_list=True)
    if isinstance(value, list) and value and len({row.shape for row in value}) == 1:
        return torch.stack(value)
    return value


def either(first: TensorDictBase, second: TensorDictBase, key: Key) -> Rows | None:
    """Return the entry at ``key`` in ``first``, else in ``second``, else None."""
    value = read_value(first, key)
    return read_value(second, key) if value is None else value


def is_ragged(value: Rows) -> bool:
    """Whether a value from :func:`read_value` has rows of different lengths, or is nested."""
    return isinstance(value, list) or value.is_nested


def to_rows(value: Rows) -> list[Tensor]:
    """Convert a value to a list of B tensors, one per sample."""
    return value if isinstance(value, list) else list(value.unbind(0))


def set_rows(tensordict: TensorDictBase, key: Key, rows: list[Tensor]) -> None:
    """Write B rows at ``key``: as a tensor [B, T, ...], or one row into each TensorDict of a stack.

    Rows of different shapes need a stack, from :func:`for_rows`.
    """
    if isinstance(tensordict, LazyStackedTensorDict) and tensordict.stack_dim == 0:
        for sample, row in zip(tensordict.tensordicts, rows, strict=True):
            sample.set(key, row)
    else:
        tensordict.set(key, torch.stack(rows))


def for_rows(tensordict: TensorDictBase, ragged: bool) -> TensorDictBase:
    """Return the TensorDict to write rows to: for ragged rows, a lazy stack of B TensorDicts.

    A plain TensorDict would make a nested tensor of ragged rows. A rollout cannot stack nested
    tensors, and for them ``get`` ignores ``as_list`` and ``as_padded_tensor``.
    """
    if ragged and not isinstance(tensordict, LazyStackedTensorDict):
        return tensordict.to_lazystack(0)
    return tensordict


def pad_rows(rows: list[Tensor], side: str) -> list[Tensor]:
    """Pad every row with zeros (False for masks) to the length of the longest row."""
    padded = pad_sequence(rows, batch_first=True, padding_value=0, padding_side=side)
    return list(padded.unbind(0))


def lengths(rows: list[Tensor]) -> list[int]:
    """Return the length T_i of every row."""
    return [row.shape[0] for row in rows]
