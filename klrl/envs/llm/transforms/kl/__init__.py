"""The transforms of ``torchrl.envs.llm.transforms.kl``, imported on first use."""

from klrl.base.imports import lazy_attribute
from klrl.kl import WHERE

_WHERE = {name: module for name, module in WHERE.items() if module.startswith(f"{__name__}.")}
_WHERE |= dict.fromkeys(("KLRewardTransform", "RayKLRewardTransform"), f"{__name__}.reward")
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, _WHERE, name)
