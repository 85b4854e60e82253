"""Losses of policy and critic, and rules that keep the policy near the sampling policy.

The TorchRL LossModules in :mod:`klrl.objectives` are imported on first use, since they load
TorchRL's objectives.
"""

from typing import TYPE_CHECKING

from klrl.base.imports import lazy_attribute
from klrl.losses.beta import BetaRule, DoublingBeta, ForwardBeta, make_beta_rule
from klrl.losses.policy import PolicyLoss
from klrl.objectives import WHERE

if TYPE_CHECKING:
    from klrl.objectives.ppo import BetaHook, ClipPPOLoss, KLPENPPOLoss

__all__ = [
    "BetaHook",
    "BetaRule",
    "ClipPPOLoss",
    "DoublingBeta",
    "ForwardBeta",
    "KLPENPPOLoss",
    "PolicyLoss",
    "make_beta_rule",
]


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, WHERE, name)
