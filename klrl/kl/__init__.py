"""KL to a reference policy: estimators, transforms, references, controllers."""

from klrl.kl.constrained import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)
from klrl.kl.controllers import (
    AdaptiveKLController,
    DualKLController,
    FixedKLController,
    ScheduledKLController,
)
from klrl.kl.divergence import estimate_kl, exact_kl, masked_mean
from klrl.kl.legacy import KLRewardTransform
from klrl.kl.reference import freeze
from klrl.kl.retrieve import KLComputation, RetrieveLogProb

__all__ = [
    "AdaptiveKLController",
    "DualKLController",
    "FixedKLController",
    "KLComputation",
    "KLConstrainedTransform",
    "KLDivergenceTransform",
    "KLRewardTransform",
    "ReferenceModelLogProbTransform",
    "RetrieveLogProb",
    "RewardAdjustmentTransform",
    "ScheduledKLController",
    "estimate_kl",
    "exact_kl",
    "freeze",
    "masked_mean",
]
