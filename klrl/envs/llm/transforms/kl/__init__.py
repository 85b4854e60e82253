"""The transforms of ``torchrl.envs.llm.transforms.kl``, imported on first use."""

from klrl.base.imports import lazy_attribute

_WHERE = {
    "KLComputation": "klrl.envs.llm.transforms.kl.computation",
    "KLRewardTransform": "klrl.envs.llm.transforms.kl.reward",
    "RayKLRewardTransform": "klrl.envs.llm.transforms.kl.reward",
    "RayRetrieveKL": "klrl.envs.llm.transforms.kl.retrieve_kl",
    "RetrieveKL": "klrl.envs.llm.transforms.kl.retrieve_kl",
    "RetrieveLogProb": "klrl.envs.llm.transforms.kl.retrieve",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, _WHERE, name)
