"""Draws tokens: one uniform number per token, and the inverse of the cumulative probabilities.

The numbers are a function of (seed, prompt, sample, position) alone. So a response does not change
with the batch that it is sampled in, when other responses finish, or which process samples it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Tokens per block of the vocabulary, see :func:`choose`.
_BLOCK = 256


def uniforms(seed: int, rows: range, group_size: int, longest: int) -> Tensor:
    """Return the uniform numbers [rows, longest] in [0, 1) of responses, float64.

    Row i is sample i % G of prompt i // G. Its numbers are a stream of Philox, a counter-based
    generator (Salmon et al. 2011), with the key (seed, prompt * 2^32 + sample); number t of the
    stream is that of position t, whatever ``longest``.
    """
    table = np.empty((len(rows), longest))
    for out, row in zip(table, rows, strict=True):
        prompt, sample = divmod(row, group_size)
        key = np.array([seed, (prompt << 32) + sample], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=key)).random(out=out)
    return torch.from_numpy(table)


def choose(log_p: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds ``uniform``, [n].

    ``log_p`` [n, V] and ``uniform`` [n] in [0, 1). The token is searched for among sums of blocks,
    then within its block: one cumulative sum over V in float64 would take several times as long,
    and in float32 it would lose the probabilities below 1e-8.
    """
    p = log_p.exp()
    room = -p.shape[-1] % _BLOCK
    blocks = torch.nn.functional.pad(p, (0, room)).unflatten(-1, (-1, _BLOCK))
    block, within = _search(blocks.sum(-1), uniform)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    chosen = block * _BLOCK + _search(inside, within)[0]
    return chosen.clamp_max(p.shape[-1] - 1)  # padding is chosen only if log_p has NaN


def _search(weight: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry [n] of weights [n, K] that ``uniform`` selects, and its place 0 .. 1 in it.

    The last cumulative sum, not 1, is the whole, so a place below 1 selects a weight above 0.
    """
    total = weight.double().cumsum(-1)
    aim = (uniform * total[:, -1])[:, None]
    entry = torch.searchsorted(total, aim, right=True).clamp_max(weight.shape[-1] - 1)
    own = weight.gather(1, entry).double()
    place = (aim - total.gather(1, entry) + own) / own
    return entry.squeeze(1), place.squeeze(1).clamp(0.0, 1 - 2**-53)
