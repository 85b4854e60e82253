"""The trust region between the policy that sampled and the policy that learns."""

from klrl.losses.beta import BetaRule, DoublingBeta, ForwardBeta, make_beta_rule
from klrl.losses.modules import BetaHook, ClipPPOLoss, KLPENPPOLoss
from klrl.losses.policy import PolicyLoss, make_loss

__all__ = [
    "BetaHook",
    "BetaRule",
    "ClipPPOLoss",
    "DoublingBeta",
    "ForwardBeta",
    "KLPENPPOLoss",
    "PolicyLoss",
    "make_beta_rule",
    "make_loss",
]
