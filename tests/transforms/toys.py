"""A small policy, before and after it moved, and every way to charge its KL."""

from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import Compose
from torchrl.modules import IndependentNormal, ProbabilisticActor

from klrl.kl import (
    KLComputation,
    KLConstrainedTransform,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
)

COUNT = 16
COEF = 0.4


def actor(distribution: type = IndependentNormal, **kwargs) -> ProbabilisticActor:
    module = TensorDictModule(
        nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]
    )
    return ProbabilisticActor(
        module, ["loc", "scale"], distribution_class=distribution, return_log_prob=True, **kwargs
    )


def charge(
    way: str, actor: nn.Module, reference: nn.Module, reward: object = "reward", **more: object
) -> nn.Module:
    """What charges COEF times the KL, which it writes as ``kl``.

    Args:
        way: ``legacy``, ``constrained``, ``retrieve`` (in one) or ``parts`` (of retrieve); then
            ``, ESTIMATOR`` where it is not k1.
    """
    kind, _, estimator = way.partition(", ")
    more = {"kl_key": "kl", **more}
    if kind == "legacy":
        return KLRewardTransform(reference, COEF, in_keys=[reward], **more)
    if kind == "constrained":
        estimator = estimator or "k1"
        return KLConstrainedTransform(
            reference, COEF, in_keys=[reward], estimator=estimator, **more
        )
    more |= {"coeff": COEF, "reward_key": reward}
    if kind == "retrieve":
        return RetrieveKL(actor, reference, **more)
    return Compose(
        RetrieveLogProb(actor, reward_key=reward),
        RetrieveLogProb(reference, log_probs_full_key=("ref_log_probs", "full"), reward_key=reward),
        KLComputation(estimator=estimator or "k1", **more),
    )
