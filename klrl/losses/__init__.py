"""The trust region between the policy that sampled and the policy that learns."""

from klrl.losses.beta import BetaRule, make_beta_rule
from klrl.losses.policy import PolicyLoss, make_loss

__all__ = ["BetaRule", "PolicyLoss", "make_beta_rule", "make_loss"]
