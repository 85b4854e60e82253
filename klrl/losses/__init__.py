"""The trust region between the policy that sampled and the policy that learns.

The LossModules are imported when they are asked for: they bring TorchRL's objectives along.
"""

from typing import TYPE_CHECKING, Any

from klrl.losses.beta import BetaRule, DoublingBeta, ForwardBeta, make_beta_rule
from klrl.losses.policy import PolicyLoss

if TYPE_CHECKING:
    from klrl.losses.modules import BetaHook, ClipPPOLoss, KLPENPPOLoss

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


def __getattr__(name: str) -> Any:
    """The LossModules, on first use."""
    if name in ("BetaHook", "ClipPPOLoss", "KLPENPPOLoss"):
        from klrl.losses import modules

        return getattr(modules, name)
    raise AttributeError(f"module 'klrl.losses' has no attribute {name!r}")
