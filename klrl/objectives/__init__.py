"""KLPENPPOLoss and ClipPPOLoss, importable as from ``torchrl.objectives``; and PPO's loss terms."""

from klrl.base.imports import lazy_attribute

WHERE = dict.fromkeys(("BetaHook", "ClipPPOLoss", "KLPENPPOLoss"), "klrl.objectives.ppo")
__all__ = list(WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, WHERE, name)
