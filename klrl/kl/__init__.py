"""KL to a reference policy: estimators, references, controllers and transforms.

The transforms are defined in :mod:`klrl.envs`. Each name is imported on its first use, so importing
this package loads neither TorchRL's environments nor Ray nor transformers.
"""

from klrl.base.imports import lazy_attribute

#: Name -> the module that defines it; the packages of :mod:`klrl.envs` take theirs from here.
WHERE = {
    "AdaptiveKLController": "klrl.kl.controllers",
    "DualKLController": "klrl.kl.controllers",
    "FixedKLController": "klrl.kl.controllers",
    "FrozenPolicy": "klrl.kl.reference",
    "HeldKLController": "klrl.kl.controllers",
    "KLComputation": "klrl.envs.llm.transforms.kl.computation",
    "KLConstrainedTransform": "klrl.envs.transforms.constrained",
    "KLDivergenceTransform": "klrl.envs.transforms.constrained",
    "KLRewardTransform": "klrl.envs.transforms.rlhf",
    "RayRetrieveKL": "klrl.envs.llm.transforms.kl.retrieve_kl",
    "ReferenceModelLogProbTransform": "klrl.envs.transforms.constrained",
    "RetrieveKL": "klrl.envs.llm.transforms.kl.retrieve_kl",
    "RetrieveLogProb": "klrl.envs.llm.transforms.kl.retrieve",
    "RewardAdjustmentTransform": "klrl.envs.transforms.constrained",
    "ScheduledKLController": "klrl.kl.controllers",
    "estimate_kl": "klrl.kl.estimators",
    "exact_kl": "klrl.kl.estimators",
    "freeze": "klrl.kl.reference",
    "masked_mean": "klrl.kl.estimators",
}
__all__ = list(WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, WHERE, name)


def __dir__() -> list[str]:
    """Include the names that are imported on first use."""
    return sorted({*globals(), *__all__})
