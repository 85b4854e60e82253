"""KL to a reference policy: estimators, references, controllers, and the transforms over them.

What a page names stands here and is imported on first use: this package alone imports neither
TorchRL's environments nor ray nor transformers. The transforms live in :mod:`klrl.transforms`.
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "AdaptiveKLController": "klrl.kl.controllers",
    "DualKLController": "klrl.kl.controllers",
    "FixedKLController": "klrl.kl.controllers",
    "FrozenPolicy": "klrl.kl.reference",
    "HeldKLController": "klrl.kl.controllers",
    "KLComputation": "klrl.transforms.computation",
    "KLConstrainedTransform": "klrl.transforms.constrained",
    "KLDivergenceTransform": "klrl.transforms.constrained",
    "KLRewardTransform": "klrl.transforms.legacy",
    "RayRetrieveKL": "klrl.transforms.retrieve_kl",
    "ReferenceModelLogProbTransform": "klrl.transforms.constrained",
    "RetrieveKL": "klrl.transforms.retrieve_kl",
    "RetrieveLogProb": "klrl.transforms.retrieve",
    "RewardAdjustmentTransform": "klrl.transforms.constrained",
    "ScheduledKLController": "klrl.kl.controllers",
    "SendToWorkers": "klrl.transforms.workers",
    "estimate_kl": "klrl.kl.estimators",
    "exact_kl": "klrl.kl.estimators",
    "freeze": "klrl.kl.reference",
    "masked_mean": "klrl.kl.estimators",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Import what is asked for on first use."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With what is imported on first use."""
    return sorted({*globals(), *__all__})
