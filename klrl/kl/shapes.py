"""The rule for shapes: a log-prob and a KL have the reward's batch shape.

A TorchRL reward is [*B, 1] (one policy, or a team's shared reward) or [*B, N, 1] (one per agent);
its batch shape is [*B] or [*B, N]. A log-prob or KL must begin with that shape. Further dimensions
(agents with a shared reward, or an action's dimensions under a plain ``Normal``) are summed, since
log-probs and KLs of independent variables add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from klrl.kl.estimators import sum_beyond


def reward_shape(reward: torch.Size, batch_dims: int) -> torch.Size:
    """Return the batch shape of a reward [*B, 1], [*B, N, 1] or [*B], without the last 1."""
    if len(reward) <= batch_dims:
        return reward
    if reward[-1] != 1:
        raise ValueError(
            f"the reward has shape {tuple(reward)} for a batch {tuple(reward[:batch_dims])}: "
            "it must end in a dimension of 1, as [*batch, 1] or [*batch, agents, 1]"
        )
    return reward[:-1]


def like_reward(name: object, value: Tensor, reward: Tensor, batch_dims: int) -> Tensor:
    """Sum a log-prob or KL to the reward's batch shape [*B] or [*B, N]; refuse other shapes."""
    shape = reward_shape(reward.shape, batch_dims)
    if value.shape[: len(shape)] != shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, the reward {tuple(reward.shape)}: it must "
            f"begin with {tuple(shape)}; several agents with one policy need one team reward"
        )
    return sum_beyond(value, len(shape))


def add_heads(heads: Sequence[Tensor]) -> Tensor:
    """Sum the log-probs or KLs of an action's heads to [*B, ...].

    Leading dimensions of equal size in all heads are kept, so that heads with a value per agent add
    up per agent. All later dimensions are summed.
    """
    shared = min(head.ndim for head in heads)
    while len({head.shape[:shared] for head in heads}) > 1:
        shared -= 1
    return torch.stack([sum_beyond(head, shared) for head in heads]).sum(0)
