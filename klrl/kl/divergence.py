"""KL(pi || pi_ref): three estimators from one sampled action, and the closed form.

All in nats. The action was sampled from pi; r = log pi(a|s) - log pi_ref(a|s).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import TanhNormal


def k1(log_ratio: Tensor) -> Tensor:
    """r: unbiased, may be negative. In the reward its policy gradient is that of the KL."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """r^2 / 2: biased, never negative (Schulman 2020, "Approximating KL divergence")."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-r) - 1 + r: unbiased, never negative (Schulman 2020)."""
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimate_kl(log_prob: Tensor, ref_log_prob: Tensor, estimator: str = "k1") -> Tensor:
    """Estimate KL(pi || pi_ref) elementwise from log-probs of actions sampled from pi.

    Args:
        log_prob: log pi(a|s), any shape, nats.
        ref_log_prob: log pi_ref(a|s), the same shape.
        estimator: k1, k2 or k3.

    Returns:
        The estimate, same shape, nats.

    Raises:
        ValueError: an unknown estimator, or shapes that differ.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator}: choose one of {', '.join(ESTIMATORS)}")
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            f"log_prob {tuple(log_prob.shape)} and ref_log_prob {tuple(ref_log_prob.shape)}: "
            "shapes must match"
        )
    return ESTIMATORS[estimator](log_prob - ref_log_prob)


def exact_kl(dist: Distribution, ref_dist: Distribution) -> Tensor:
    """KL(dist || ref_dist) in closed form, event dimensions summed.

    Args:
        dist: the policy's distribution.
        ref_dist: the reference's; TanhNormals must have the same bounds.

    Returns:
        Shape ``dist.batch_shape``, nats.

    Raises:
        NotImplementedError: no closed form is known; both types are named.
        ValueError: two TanhNormals with different bounds, whose KL is infinite or not closed.
    """
    if isinstance(dist, TanhNormal) and isinstance(ref_dist, TanhNormal):
        same = torch.equal(dist.low + 0.0 * ref_dist.low, ref_dist.low + 0.0 * dist.low)
        same = same and torch.equal(
            dist.high + 0.0 * ref_dist.high, ref_dist.high + 0.0 * dist.high
        )
        if not same:
            raise ValueError(
                "TanhNormal with different bounds: their supports differ, so KL has no closed form"
            )
        # A KL is invariant under a shared bijection: it is that of the Gaussians before tanh.
        dist, ref_dist = dist.base_dist, ref_dist.base_dist
    try:
        return torch.distributions.kl_divergence(dist, ref_dist)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"KL({type(dist).__name__} || {type(ref_dist).__name__}) has no closed form here"
        ) from error
