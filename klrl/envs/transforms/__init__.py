"""KL transforms for control, and :class:`SendToWorkers`; imported on first use."""

from klrl.base.imports import lazy_attribute

_WHERE = {
    "KLConstrainedTransform": "klrl.envs.transforms.constrained",
    "KLDivergenceTransform": "klrl.envs.transforms.constrained",
    "KLRewardTransform": "klrl.envs.transforms.rlhf",
    "ReferenceModelLogProbTransform": "klrl.envs.transforms.constrained",
    "RewardAdjustmentTransform": "klrl.envs.transforms.constrained",
    "SendToWorkers": "klrl.envs.transforms.workers",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, _WHERE, name)
