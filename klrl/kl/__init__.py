"""KL to a reference policy: estimators, transforms, references, controllers.

The Ray-backed transforms are looked up when they are asked for: importing this package imports
neither ray nor transformers.
"""

from importlib import import_module
from typing import Any

from klrl.kl.controllers import (
    AdaptiveKLController,
    DualKLController,
    FixedKLController,
    ScheduledKLController,
)
from klrl.kl.estimators import estimate_kl, exact_kl, masked_mean
from klrl.kl.reference import freeze
from klrl.transforms.constrained import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)
from klrl.transforms.legacy import KLRewardTransform
from klrl.transforms.retrieve import KLComputation, RetrieveLogProb
from klrl.transforms.retrieve_kl import RetrieveKL
from klrl.transforms.workers import SendToWorkers

__all__ = [
    "AdaptiveKLController",
    "DualKLController",
    "FixedKLController",
    "KLComputation",
    "KLConstrainedTransform",
    "KLDivergenceTransform",
    "KLRewardTransform",
    "RayRetrieveKL",
    "ReferenceModelLogProbTransform",
    "RetrieveKL",
    "RetrieveLogProb",
    "RewardAdjustmentTransform",
    "ScheduledKLController",
    "SendToWorkers",
    "estimate_kl",
    "exact_kl",
    "freeze",
    "masked_mean",
]

_LAZY = {"RayRetrieveKL": "klrl.transforms.served"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
