"""KL(pi || pi_ref): three estimators from one sampled action, and the closed form.

All values are in nats. The action was sampled from pi; r = log pi(a|s) - log pi_ref(a|s).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent
from torch.nn.functional import logsigmoid
from torchrl.modules import TanhNormal

from klrl.base.errors import ConfigError
from klrl.config.placement import SAMPLED
from klrl.kl.divergences import over_actions
from klrl.kl.from_logits import tempered_log_softmax


def k1(log_ratio: Tensor) -> Tensor:
    """r: unbiased, may be negative. Charged to the reward, only k1 gives the KL's gradient."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """r^2 / 2: biased, never negative (Schulman 2020, "Approximating KL divergence")."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-r) - 1 + r: unbiased, never negative (Schulman 2020)."""
    return torch.expm1(-log_ratio) + log_ratio


def _declared() -> dict[str, Callable[[Tensor], Tensor]]:
    for name in SAMPLED.keys() - globals():
        raise ConfigError(
            f"kl.estimator={name}: klrl/config/placement.py declares it, but klrl/kl/estimators.py "
            "has no function of that name; add one"
        )
    return {name: globals()[name] for name in SAMPLED}


#: Name in ``SAMPLED`` -> the function of that name above.
ESTIMATORS = _declared()
#: A key of ESTIMATORS, ``exact``, or the user's elementwise function from r to nats.
Estimator: TypeAlias = str | Callable[[Tensor], Tensor]


def function_of(estimator: Estimator) -> Callable[[Tensor], Tensor]:
    """Return an estimator's function of the log-ratio."""
    if not isinstance(estimator, str):
        return estimator
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator={estimator}: choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[estimator]


def estimate_kl(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    estimator: Estimator = "k1",
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate KL(pi || pi_ref) elementwise, in float32 or wider, from actions sampled from pi.

    Args:
        log_prob: log pi(a|s), any shape, nats.
        ref_log_prob: log pi_ref(a|s), the same shape.
        estimator: k1, k2, k3 or a function of the log-ratio.
        mask: the same shape, bool or 0 and 1; at False the result is 0, even for NaN inputs.
    """
    function = function_of(estimator)
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            f"log_prob {tuple(log_prob.shape)} and ref_log_prob {tuple(ref_log_prob.shape)}: "
            "shapes must match"
        )
    log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    if mask is None:
        return function(log_prob - ref_log_prob)
    mask = as_mask(mask, log_prob)
    # Padding may contain -inf or NaN, which must reach neither the result nor its gradient.
    log_prob, ref_log_prob = (x.masked_fill(~mask, 0.0) for x in (log_prob, ref_log_prob))
    return function(log_prob - ref_log_prob).masked_fill(~mask, 0.0)


def as_mask(mask: Tensor, value: Tensor) -> Tensor:
    """Convert a mask to bool and check its shape; tokenizers return int64 masks."""
    if mask.shape != value.shape:
        raise ValueError(
            f"mask {tuple(mask.shape)} and values {tuple(value.shape)}: shapes must match"
        )
    return mask.bool()


def masked_mean(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average ``value`` where ``mask`` is true; return 0 if ``mask`` has no true entry.

    ``mask`` has the shape of ``value``, bool or 0 and 1; None: all are true.
    """
    if mask is None:
        return value.mean()
    mask = as_mask(mask, value)
    return value.masked_fill(~mask, 0.0).sum() / mask.sum().clamp_min(1)


def sequence_mean(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum over the real steps of each row [B, T], then average over rows: long rows weigh more."""
    if mask is None:
        return value.sum() / value.shape[0]
    mask = as_mask(mask, value)
    return value.masked_fill(~mask, 0.0).sum() / mask.shape[0]


def exact_kl(dist: Distribution, ref_dist: Distribution) -> Tensor:
    """Compute KL(dist || ref_dist) in closed form, nats, in the batch shape.

    Supports Normal, IndependentNormal, TanhNormal, Categorical, OneHotCategorical, masked
    categoricals, Bernoulli, all pairs for which torch has a closed form, and CompositeDistribution
    (the sum over its heads). TanhNormals must have the same bounds, composites the same heads,
    categoricals the same actions.

    Raises:
        NotImplementedError: no closed form is known; the message names both types.
    """
    if isinstance(dist, CompositeDistribution) and isinstance(ref_dist, CompositeDistribution):
        return _composite(dist, ref_dist)
    if isinstance(dist, Independent) and isinstance(ref_dist, Independent):
        dims = dist.reinterpreted_batch_ndims
        if dims == ref_dist.reinterpreted_batch_ndims:
            kl = exact_kl(dist.base_dist, ref_dist.base_dist)
            return sum_beyond(kl, kl.ndim - dims)
    if isinstance(dist, Bernoulli) and isinstance(ref_dist, Bernoulli):
        # Torch's KL is inf where the reference's probability rounds to 1: in float32, at logit 17.
        logits = (torch.stack([each.logits, -each.logits], -1) for each in (dist, ref_dist))
        return over_actions("reverse", *map(logsigmoid, logits))
    if isinstance(dist, TanhNormal) and isinstance(ref_dist, TanhNormal):
        _require_same_bounds(dist, ref_dist)
        # A KL is invariant under a shared bijection: compare the Gaussians before tanh.
        dist, ref_dist = dist.base_dist, ref_dist.base_dist
    if isinstance(dist, _DISCRETE) and isinstance(ref_dist, _DISCRETE):
        _require_same_actions(dist, ref_dist)
        log_p, log_q = (tempered_log_softmax(each.logits, 1.0) for each in (dist, ref_dist))
        return over_actions("reverse", log_p, log_q)
    try:
        return torch.distributions.kl_divergence(dist, ref_dist)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"KL({type(dist).__name__} || {type(ref_dist).__name__}) has no closed form here"
        ) from error


_DISCRETE = (torch.distributions.Categorical, torch.distributions.OneHotCategorical)


def _composite(dist: CompositeDistribution, ref_dist: CompositeDistribution) -> Tensor:
    """Sum the KLs of the heads, which are independent given the state."""
    if set(dist.dists) != set(ref_dist.dists):
        raise ValueError(
            f"heads {sorted(map(str, dist.dists))} and {sorted(map(str, ref_dist.dists))}: "
            "must be the same"
        )
    batch_dims = len(dist.batch_shape)
    heads = (exact_kl(head, ref_dist.dists[name]) for name, head in dist.dists.items())
    return torch.stack([sum_beyond(kl, batch_dims) for kl in heads]).sum(0)


def sum_beyond(value: Tensor, batch_dims: int) -> Tensor:
    """Sum over all dimensions after the first ``batch_dims``."""
    return value.flatten(batch_dims).sum(-1) if value.ndim > batch_dims else value


def _require_same_actions(dist: Any, ref_dist: Any) -> None:
    both = (dist, ref_dist)
    count, ref_count = (each.logits.shape[-1] for each in both)
    if count != ref_count:
        raise ValueError(f"categoricals of {count} and {ref_count} actions: must be equal")
    # Logit k of TorchRL's sparse categoricals is of action indices[k]; _mask has the indices.
    one, other = (each._mask if getattr(each, "_sparse_mask", False) else None for each in both)
    if one is not other and (one is None or other is None or bool((one != other).any())):
        raise ValueError("categoricals with different indices: their actions must be the same")


def _require_same_bounds(dist: TanhNormal, ref_dist: TanhNormal) -> None:
    for name in ("low", "high"):
        bound, ref_bound = torch.broadcast_tensors(getattr(dist, name), getattr(ref_dist, name))
        if not torch.equal(bound, ref_bound):
            raise ValueError(
                "TanhNormal with different bounds: their supports differ, so KL has no closed form"
            )
