"""Where KL(policy||reference) is charged: the only minus, and the sums of what is still to come.

Pure functions of tensors; KLs are in nats, coefficients in reward units per nat. Which estimator
may be charged where is :data:`klrl.config.placement.VERDICTS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klrl.config.placement import PLACEMENTS


def shaped(reward: Tensor, kl: Tensor, coef: float | Tensor) -> Tensor:
    """Reward - coef * KL. An advantage is charged in the same way, with the KL to go.

    Args:
        reward: any shape.
        kl: the same shape.
        coef: one number.

    Raises:
        ValueError: shapes that differ; they would be broadcast to a matrix.
    """
    if reward.shape != kl.shape:
        raise ValueError(
            f"reward {tuple(reward.shape)} and KL {tuple(kl.shape)}: shapes must match"
        )
    return reward - coef * kl


def penalized(gain: Tensor, kl: Tensor, coef: Tensor) -> Tensor:
    """Gain - coef * KL, what a loss maximises: one operation, with a gradient through both.

    Args:
        gain: [B].
        kl: KL(policy||reference) as the loss charges it [B].
        coef: a scalar.
    """
    return torch.addcmul(gain, kl, coef, value=-1)


def to_go(kl: Tensor, mask: Tensor | None = None, placement: str = "reward") -> Tensor:
    """The KL that the choice at each step is charged with, for episodes without a critic.

    ``reward``: sum_{t' >= t}; ``split``: sum_{t' > t}, since the own step stands in the loss and
    its exact KL in the reward depends on the state alone; ``loss``: 0.

    Args:
        kl: of every step of whole episodes [B, T].
        mask: bool [B, T], where steps are real; the others count nowhere, whatever they hold.
        placement: reward, loss or split.

    Returns:
        [B, T], 0 outside the mask.

    Raises:
        ValueError: an unknown placement.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement}: choose one of {', '.join(PLACEMENTS)}")
    if placement == "loss":
        return torch.zeros_like(kl)
    if mask is not None:
        kl = kl.masked_fill(~mask, 0.0)
    later = kl.flip(1).cumsum(1).flip(1)
    if placement == "split":
        later = later - kl
    return later if mask is None else later.masked_fill(~mask, 0.0)
