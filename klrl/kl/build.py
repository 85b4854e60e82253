"""From the ``kl`` group to one transform: add a mode here, with a YAML and a schema."""

from __future__ import annotations

from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torchrl.envs import Compose, Transform

from klrl.config import KLConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.kl.legacy import KLRewardTransform
from klrl.kl.retrieve import KLComputation, RetrieveLogProb

#: Where the KL stands below "next" in every control batch.
KL_KEY, REF_LOG_PROB_KEY, RAW_REWARD_KEY = "kl_penalty", "ref_log_prob", "reward_raw"


class ReferenceKL(nn.Module):
    """The KL to the reference of one run: its transform and its coefficient.

    Args:
        transform: charges the reward; for ``kl.apply=step`` it is attached to the environment.
        owner: the part of it whose buffer ``name`` is the coefficient, reward per nat.
        name: of that buffer.
        online: whether the environment applies the transform at every step.
    """

    def __init__(self, transform: Transform, owner: nn.Module, name: str, online: bool) -> None:
        super().__init__()
        self.transform, self.online = transform, online
        # By name: a move to another device replaces the buffer.
        self._owner, self._name = owner, name

    @property
    def coef(self) -> float:
        """Reward per nat."""
        return float(getattr(self._owner, self._name))

    @coef.setter
    def coef(self, value: float) -> None:
        getattr(self._owner, self._name).fill_(value)


def make_reference_kl(
    config: KLConfig,
    actor: ProbabilisticTensorDictSequential,
    reference: ProbabilisticTensorDictSequential,
) -> ReferenceKL | None:
    """Build the transform of ``kl.mode``; None for ``kl=none``.

    Args:
        config: the kl group.
        actor: the live policy, not copied.
        reference: the frozen policy.
    """
    if isinstance(config, RetrieveKLConfig):
        return _retrieve(config, actor, reference)
    if isinstance(config, LegacyKLConfig):
        return _legacy(config, reference)
    return None


def _retrieve(
    config: RetrieveKLConfig,
    actor: ProbabilisticTensorDictSequential,
    reference: ProbabilisticTensorDictSequential,
) -> ReferenceKL:
    computation = KLComputation(
        "log_prob",
        REF_LOG_PROB_KEY,
        kl_key=KL_KEY,
        coeff=config.coef,
        estimator=config.estimator,
        raw_reward_key=RAW_REWARD_KEY,
    )
    transform = Compose(
        RetrieveLogProb(actor, log_probs_full_key="log_prob"),
        RetrieveLogProb(reference, log_probs_full_key=REF_LOG_PROB_KEY),
        computation,
    )
    return ReferenceKL(transform, computation, "coeff", config.apply == "step")


def _legacy(config: LegacyKLConfig, reference: ProbabilisticTensorDictSequential) -> ReferenceKL:
    transform = KLRewardTransform(
        reference,
        coef=config.coef,
        kl_key=KL_KEY,
        ref_log_prob_key=REF_LOG_PROB_KEY,
        raw_reward_key=RAW_REWARD_KEY,
    )
    return ReferenceKL(transform, transform, "coef", config.apply == "step")
