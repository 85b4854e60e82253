"""KL(policy || reference) per token of a rollout, and the reward that it is charged to.

B responses of at most R tokens, ``mask`` [B, R] bool where they are real; nats. Everything is pure.
Which estimator may stand where is docs/kl.md's table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klrl.config.placement import check_placement as check_placement
from klrl.kl.charge import shaped
from klrl.kl.charge import to_go as kl_to_go  # noqa: F401  (this module's name for it)
from klrl.kl.estimators import estimate_kl


def sampled_kl(
    estimator: str, log_prob: Tensor, ref_log_prob: Tensor, exact: Tensor | None, mask: Tensor
) -> Tensor:
    """KL(pi_old || pi_ref) of every token of a rollout, [B, R]; 0 at padding.

    Args:
        estimator: k1, k2, k3 or exact.
        log_prob: log pi_old [B, R].
        ref_log_prob: log pi_ref [B, R].
        exact: the exact KL [B, R], which ``exact`` needs.
        mask: [B, R].

    Raises:
        ValueError: ``exact`` without one.
    """
    if estimator != "exact":
        return estimate_kl(log_prob, ref_log_prob, estimator, mask)
    if exact is None:
        raise ValueError("estimator=exact: the exact KL is missing")
    return exact.masked_fill(~mask, 0.0)


def shaped_reward(
    score: Tensor, kl: Tensor, mask: Tensor, coef: float | Tensor, placement: str
) -> Tensor:
    """Reward per token: the score on the last token, minus coef * KL where the reward is charged.

    Args:
        score: one per response [B].
        kl: per token [B, R].
        mask: [B, R], at least one token in every row.
        coef: of the KL; raw reward units per nat.
        placement: reward, loss or split; ``loss`` leaves the reward alone.

    Returns:
        [B, R, 1], 0 at padding.
    """
    last = mask.sum(1, keepdim=True) - 1
    reward = torch.zeros_like(kl).scatter(1, last, score[:, None].to(kl.dtype))
    if placement != "loss":
        reward = shaped(reward, kl.masked_fill(~mask, 0.0), coef)
    return reward.unsqueeze(-1)
