"""What TorchRL is told of N copies: shapes, types and bounds of what they take and return."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    TensorSpec,
    Unbounded,
)

from klrl.control.action_space import require_served


def observation_spec(shape: tuple[int, ...], dtype: np.dtype, n: int) -> Composite:
    """``observation`` [N, ...]: bytes, or else float32."""
    stored = torch.uint8 if dtype == np.uint8 else torch.float32
    return Composite(observation=Unbounded(shape=(n, *shape), dtype=stored), shape=(n,))


def action_spec(setting: str, space: gymnasium.Space, n: int) -> Composite:
    """``action`` of the policy, flat, as :mod:`klrl.control.action_space` says."""
    require_served(setting, space)
    return Composite(action=_of_actions(space, n), shape=(n,))


def reward_spec(n: int) -> Composite:
    """``reward`` [N, 1]."""
    return Composite(reward=Unbounded(shape=(n, 1)), shape=(n,))


def done_spec(n: int) -> Composite:
    """``done, terminated, truncated`` [N, 1]."""
    flags = {
        name: Categorical(2, dtype=torch.bool, shape=(n, 1))
        for name in ("done", "terminated", "truncated")
    }
    return Composite(flags, shape=(n,))


def _of_actions(space: gymnasium.Space, n: int) -> TensorSpec:
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=(n,), dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.reshape(-1).tolist()
        return MultiCategorical(counts, shape=(n, len(counts)), dtype=torch.int64)
    size = int(np.prod(space.shape))
    if isinstance(space, spaces.MultiBinary):
        return Binary(size, shape=(n, size), dtype=torch.int64)
    assert isinstance(space, spaces.Box)
    if not np.isfinite([space.low, space.high]).all():
        return Unbounded(shape=(n, size), dtype=torch.float32)
    low, high = (
        torch.as_tensor(x.reshape(-1), dtype=torch.float32) for x in (space.low, space.high)
    )
    shape = (n, size)
    return Bounded(
        low.expand(shape).clone(), high.expand(shape).clone(), shape=shape, dtype=torch.float32
    )
