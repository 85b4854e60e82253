"""PPO's loss terms, one number per position, and functions that reduce them to a scalar loss.

Positions are frames [B] or tokens [B, R], written [B] below. Log-probs, KLs and entropies are in
nats. ``mask`` has the same shape, bool or 0 and 1, True at real positions; None: all are real.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss, smooth_l1_loss

from klrl.kl.estimators import Estimator, as_mask, function_of, masked_mean, sequence_mean

#: Lower bound of the number by which advantages are divided.
_FLOOR = 1e-6
_DISTANCES = {"l1": l1_loss, "l2": mse_loss, "smooth_l1": smooth_l1_loss}


def normalized(advantage: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (A - mean) / spread over the minibatch [B], 0 at padding; and the spread, a scalar.

    The advantages are divided by their standard deviation, or by 1e-6 if that is larger, as in
    TorchRL. In the second case the returned spread is 1, since callers divide a KL by it.
    """
    if mask is None:
        std, mean = torch.std_mean(advantage)
        return (advantage - mean) / std.clamp_min(_FLOOR), _real(std)
    mask = as_mask(mask, advantage)
    centred = (advantage - masked_mean(advantage, mask)).masked_fill(~mask, 0.0)
    std = (centred.square().sum() / (mask.sum() - 1).clamp_min(1)).sqrt()
    return centred / std.clamp_min(_FLOOR), _real(std)


def _real(std: Tensor) -> Tensor:
    return torch.where(std > _FLOOR, std, torch.ones_like(std))


def surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Compute w A with w = pi_theta(a|s) / pi_old(a|s), all [B] (Schulman et al. 2017, eq. 6)."""
    return (log_prob - old_log_prob).exp() * advantage


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
) -> Tensor:
    """Compute min(w A, clip(w, 1 - epsilon, 1 + epsilon) A), [B] (Schulman et al. 2017, eq. 7).

    w is as in :func:`surrogate`. With ``epsilon_high``, w is clipped to 1 - epsilon ..
    1 + epsilon_high (Yu et al. 2025, "DAPO", eq. 10).
    """
    ratio = (log_prob - old_log_prob).exp()
    highest = 1 + (epsilon if epsilon_high is None else epsilon_high)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, highest) * advantage)


def reference_kl(
    estimator: Estimator, log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor
) -> Tensor:
    """Estimate KL(pi_theta || pi_ref) and its gradient from actions of pi_old, [B].

    Let w = pi_theta / pi_old and r = log pi_theta - log pi_ref. k1 gives w r, k3 gives w k3(r), a
    custom f gives w f(r), each with a gradient through w. k2 gives w.detach() r^2 / 2. Without w,
    the mean gradient would be 0 for k1, and that of the forward KL for k3 (docs/kl.md).
    """
    ratio = (log_prob - old_log_prob).exp()
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * function_of(estimator)(log_prob - ref_log_prob)


def critic_loss(
    value: Tensor, target: Tensor, old_value: Tensor, kind: str, clip_value: float | None
) -> Tensor:
    """Compute the distance of V_theta(s) to its target, [B]; ``l2`` has no factor 1/2.

    With ``clip_value``, it is the larger of two distances: that of V_theta(s), and that of
    V_theta(s) clipped to within ``clip_value`` of ``old_value``. TorchRL does the same.
    """
    distance = _DISTANCES[kind]
    loss = distance(value, target, reduction="none")
    if clip_value is None:
        return loss
    near = old_value + (value - old_value).clamp(-clip_value, clip_value)
    return torch.maximum(loss, distance(near, target, reduction="none"))


def total(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum over real positions."""
    return value.sum() if mask is None else value.masked_fill(~as_mask(mask, value), 0.0).sum()


def response(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average over the steps of each row [B, R], then over rows: all rows weigh the same.

    This is 1/G sum_i 1/|o_i| sum_t of Shao et al. (2024), "DeepSeekMath", eq. 3. A row without
    steps counts as 0.
    """
    if mask is None:
        return value.mean()
    mask = as_mask(mask, value)
    rows = value.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp_min(1)
    return rows.mean()


#: ``loss.reduction``: mean and sum reduce frames; token, response and sequence reduce tokens.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "mean": masked_mean,
    "sum": total,
    "token": masked_mean,
    "response": response,
    "sequence": sequence_mean,
}
