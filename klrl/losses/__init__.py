"""Losses of policy and critic, and rules that keep the policy near the sampling policy.

The TorchRL LossModules of :mod:`klrl.objectives` are imported on first use, since they load
TorchRL's objectives.
"""

from klrl.base.imports import lazy_attribute
from klrl.losses.beta import BetaRule, DoublingBeta, ForwardBeta, make_beta_rule
from klrl.losses.policy import PolicyLoss

#: The LossModules -> the module that defines them.
WHERE = dict.fromkeys(("BetaHook", "ClipPPOLoss", "KLPENPPOLoss"), "klrl.objectives.ppo")
__all__ = ["BetaRule", "DoublingBeta", "ForwardBeta", "PolicyLoss", "make_beta_rule", *WHERE]


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, WHERE, name)
