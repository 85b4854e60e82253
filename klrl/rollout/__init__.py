"""Who produces rollouts."""

from klrl.rollout.torchrl import TorchRLRollout

__all__ = ["TorchRLRollout"]
