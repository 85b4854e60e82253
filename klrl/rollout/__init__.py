"""Who produces rollouts: a class with ``collect()`` and ``close()``."""

from __future__ import annotations

from typing import Protocol

import torch
from tensordict import TensorDictBase
from torchrl.envs import TransformedEnv

from klrl.config import CollectorConfig
from klrl.models import Agent
from klrl.rollout.torchrl import TorchRLRollout
from klrl.rollout.vector import VectorRollout, make_plan

__all__ = ["Rollout", "TorchRLRollout", "VectorRollout", "make_rollout"]


class Rollout(Protocol):
    """What the experiment needs of a collector."""

    def collect(self) -> TensorDictBase:
        """The next rollout, [N, T]."""

    def close(self) -> None:
        """Let go of the environment."""


def make_rollout(
    config: CollectorConfig, env: TransformedEnv, agent: Agent, device: torch.device
) -> tuple[Rollout, str | None]:
    """The collector of the group's choice; and, where it is another than the chosen, why."""
    why = None
    if config.name == "vector":
        plan = make_plan(env)
        if not isinstance(plan, str):
            return VectorRollout(env, agent, config.steps, device), None
        why = f"collector=vector: {plan}; TorchRL's collector is used"
    return TorchRLRollout(env, agent.actor, config.steps, device), why
