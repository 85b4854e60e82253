"""KL(pi_theta || pi_ref) of a rollout by every estimator, whichever of them is applied."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor

from klrl.kl.divergence import ESTIMATORS
from klrl.models.distributions import Family


@torch.no_grad()
def measure_reference_kl(
    batch: TensorDictBase, reference: ProbabilisticTensorDictSequential, family: Family
) -> dict[str, Tensor]:
    """Mean KL(pi_theta || pi_ref) over a rollout, in nats per frame.

    pi_theta is the policy that sampled the batch, whose parameters and log-probs the batch holds.

    Args:
        batch: [N, T] with the family's parameters, its sample and ``action_log_prob``.
        reference: the frozen policy, of the same family.
        family: the action distribution.

    Returns:
        ``exact`` (closed form), ``k1``, ``k2``, ``k3``: scalars.
    """
    policy = {key: batch.get(key) for key in family.param_keys}
    ref_batch = reference.get_dist_params(batch.select(*reference.in_keys))
    ref = {key: ref_batch.get(key) for key in family.param_keys}
    ref_log_prob = family.log_prob(ref, batch.get(family.sample_key))
    log_ratio = batch.get("action_log_prob") - ref_log_prob
    sampled = {name: estimator(log_ratio).mean() for name, estimator in ESTIMATORS.items()}
    return {"exact": family.kl(policy, ref).mean(), **sampled}
