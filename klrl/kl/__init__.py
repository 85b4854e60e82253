"""KL to a reference policy: estimators, transforms, references."""

from klrl.kl.divergence import estimate_kl, exact_kl
from klrl.kl.legacy import KLRewardTransform
from klrl.kl.reference import freeze
from klrl.kl.retrieve import KLComputation, RetrieveLogProb

__all__ = [
    "KLComputation",
    "KLRewardTransform",
    "RetrieveLogProb",
    "estimate_kl",
    "exact_kl",
    "freeze",
]
