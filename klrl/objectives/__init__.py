"""KLPENPPOLoss and ClipPPOLoss, in the layout of TorchRL; and their terms as functions."""

from klrl.base.imports import look_up

_WHERE = dict.fromkeys(("BetaHook", "ClipPPOLoss", "KLPENPPOLoss"), "klrl.objectives.ppo")
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    return look_up(__name__, _WHERE, name)
