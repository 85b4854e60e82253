"""From the ``kl`` group to what a run does with it: a factory for each mode."""

from __future__ import annotations

from typing import TypeAlias

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torchrl.envs import Compose, Transform

from klrl.config import CONTROL, KLConfig, LegacyKLConfig, RetrieveKLConfig, factory
from klrl.kl.measure import AnnotatedReference
from klrl.transforms.constrained import KLDivergenceTransform, RewardAdjustmentTransform
from klrl.transforms.legacy import KLRewardTransform
from klrl.transforms.retrieve import KLComputation, RetrieveLogProb

#: Where the KL stands below "next" in every control batch.
KL_KEY, REF_LOG_PROB_KEY, RAW_REWARD_KEY = "kl_penalty", "ref_log_prob", "reward_raw"


class ReferenceKL(nn.Module):
    """KL(policy||reference) in one run: its coefficient, and where it is charged.

    Args:
        coef: reward per nat, at the start; or where the transform keeps it, a module and the name
            of its buffer.
        transform: charges the reward; None where the reward is left alone.
        online: whether the environment applies the transform at every step.
        loss_estimator: what the loss charges: exact, k1, k2 or k3; None where it charges nothing.
    """

    def __init__(
        self,
        coef: float | tuple[nn.Module, str],
        transform: Transform | None = None,
        *,
        online: bool = False,
        loss_estimator: str | None = None,
    ) -> None:
        super().__init__()
        self.transform, self.online = transform, online
        self.loss_estimator = loss_estimator
        if not isinstance(coef, tuple):
            self.register_buffer("_coef", torch.as_tensor(coef, dtype=torch.float64))
            coef = (self, "_coef")
        self._kept = coef

    @property
    def coef(self) -> float:
        """Reward per nat."""
        return float(self._coef_tensor)

    @coef.setter
    def coef(self, value: float) -> None:
        self._coef_tensor.fill_(value)

    @property
    def _coef_tensor(self) -> Tensor:
        # By name: a move to another device replaces a buffer.
        module, name = self._kept
        return module.get_buffer(name)


Reference: TypeAlias = ProbabilisticTensorDictSequential | AnnotatedReference


def make_reference_kl(
    config: KLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference
) -> ReferenceKL | None:
    """Build the transform of ``kl``; None for ``kl=none``.

    Args:
        config: the kl group.
        actor: the live policy, not copied.
        reference: the frozen policy, not copied: where it moves, the transform follows.
    """
    return factory("kl", config, CONTROL)(config, actor, reference)


def no_kl(config: KLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference) -> None:
    """``kl=none``: nothing measured, nothing charged."""


def retrieve(
    config: RetrieveKLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference
) -> ReferenceKL:
    """``kl=retrieve``: log-probs of both, then the KL; arguments as :func:`make_reference_kl`."""
    loss_estimator = None if config.placement == "reward" else config.estimator
    if config.placement == "loss":
        return ReferenceKL(config.coef, loss_estimator=loss_estimator)
    retrieved = (
        RetrieveLogProb(actor, log_probs_full_key="log_prob"),
        RetrieveLogProb(reference, log_probs_full_key=REF_LOG_PROB_KEY),
    )
    if config.estimator == "exact":
        charge = RewardAdjustmentTransform(
            config.coef, kl_key=KL_KEY, raw_reward_key=RAW_REWARD_KEY
        )
        compare = KLDivergenceTransform(
            reference, estimator="exact", ref_log_prob_key=REF_LOG_PROB_KEY, kl_key=KL_KEY
        )
        transform, coef = Compose(*retrieved, compare, charge), (charge, "coef")
    else:
        computation = KLComputation(
            "log_prob",
            REF_LOG_PROB_KEY,
            kl_key=KL_KEY,
            coeff=config.coef,
            estimator=config.estimator,
            raw_reward_key=RAW_REWARD_KEY,
        )
        transform, coef = Compose(*retrieved, computation), (computation, "coeff")
    return ReferenceKL(
        coef,
        transform,
        online=config.apply == "step",
        loss_estimator=loss_estimator,
    )


def legacy(
    config: LegacyKLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference
) -> ReferenceKL:
    """``kl=legacy``: one transform; arguments as :func:`make_reference_kl`."""
    transform = KLRewardTransform(
        reference,
        coef=config.coef,
        kl_key=KL_KEY,
        ref_log_prob_key=REF_LOG_PROB_KEY,
        raw_reward_key=RAW_REWARD_KEY,
    )
    # It copied what is frozen already; one reference is enough, and it may move.
    transform.reference = reference
    return ReferenceKL((transform, "coef"), transform, online=config.apply == "step")
