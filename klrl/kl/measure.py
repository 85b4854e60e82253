"""KL(pi_theta || pi_ref) of a rollout by every estimator, whichever of them is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.distributions import Distribution

from klrl.base.errors import NonFiniteError
from klrl.kl.estimators import ESTIMATORS, masked_mean, sequence_mean

if TYPE_CHECKING:
    from klrl.kl.family import Family


@torch.no_grad()
def annotate(
    batch: TensorDictBase, reference: ProbabilisticTensorDictSequential, family: Family
) -> None:
    """Write what pi_ref says of a rollout, once for the whole batch.

    Args:
        batch: [N, T]; gets ``("ref", key)`` for the family's parameters and ``("ref", "log_prob")``
            [N, T] of the actions that were taken.
        reference: the frozen policy, of the same family.
        family: the action distribution.
    """
    scored = reference.get_dist_params(batch.select(*reference.in_keys))
    ref = {key: scored.get(key) for key in family.param_keys}
    for key, value in ref.items():
        batch.set(("ref", key), value)
    batch.set(("ref", "log_prob"), family.log_prob(ref, batch.get(family.sample_key)))


class AnnotatedReference(nn.Module):
    """pi_ref, which looks its answers up in a batch that :func:`annotate` has written them into.

    A reference costs one forward per rollout, however many transforms ask it. Batches without an
    annotation (single steps of an environment) are evaluated.

    Args:
        reference: the frozen policy; its attributes are this module's too.
    """

    def __init__(self, reference: ProbabilisticTensorDictSequential) -> None:
        super().__init__()
        self.reference = reference

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "reference":  # while it is being copied or unpickled
                raise
            return getattr(self.reference, name)

    def log_prob(self, batch: TensorDictBase) -> Tensor:
        """log pi_ref(a|s), [N, T]."""
        known = batch.get(("ref", "log_prob"), None)
        return self.reference.log_prob(batch) if known is None else known

    def get_dist(self, batch: TensorDictBase) -> Distribution:
        """pi_ref(.|s)."""
        known = batch.get("ref", None)
        if known is None:
            return self.reference.get_dist(batch)
        return self.reference.build_dist_from_params(known)


@torch.no_grad()
def measure(exact: Tensor, log_ratio: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Mean KL(pi_theta || pi_ref) of a rollout by every estimator, in nats.

    Args:
        exact: the closed form of every step, [N, T] or [B, R].
        log_ratio: log pi_theta - log pi_ref of what was done, the same shape.
        mask: bool, where steps are real; None: everywhere.

    Returns:
        ``exact``, ``k1``, ``k2``, ``k3``, means over steps. With a mask beside them ``exact_seq``
        and so on: sums over a row, means over rows.

    Raises:
        NonFiniteError: one of them is NaN or infinite.
    """
    per_step = {"exact": exact}
    per_step |= {name: estimator(log_ratio) for name, estimator in ESTIMATORS.items()}
    if mask is None:
        found = {name: value.mean() for name, value in per_step.items()}
    else:
        per_step = {name: value.double() for name, value in per_step.items()}
        found = {name: masked_mean(value, mask) for name, value in per_step.items()}
        found |= {f"{name}_seq": sequence_mean(value, mask) for name, value in per_step.items()}
    for name, value in found.items():
        if not torch.isfinite(value):
            raise NonFiniteError(
                f"kl/ref/{name} is {float(value)}; raise kl.coef or lower optim.lr"
            )
    return found


@torch.no_grad()
def measure_reference_kl(batch: TensorDictBase, family: Family) -> dict[str, Tensor]:
    """:func:`measure` of an annotated rollout of control, in nats per frame.

    pi_theta is the policy that sampled the batch, whose parameters and log-probs the batch holds.

    Returns:
        ``exact`` (closed form), ``k1``, ``k2``, ``k3``: scalars.

    Raises:
        NonFiniteError: one of them is NaN or infinite.
    """
    policy = {key: batch.get(key) for key in family.param_keys}
    ref = {key: batch.get(("ref", key)) for key in family.param_keys}
    log_ratio = batch.get("action_log_prob") - batch.get(("ref", "log_prob"))
    return measure(family.kl(policy, ref), log_ratio)
