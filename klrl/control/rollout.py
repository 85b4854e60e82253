"""Who produces rollouts: a class with ``collect()`` and ``close()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchrl.envs import EnvBase, Transform, TransformedEnv

from klrl.config import CONTROL, Config, factory
from klrl.control.actor import Agent
from klrl.control.env import transformed
from klrl.control.vector import VectorRollout, make_plan
from klrl.train.loop import Rollout

__all__ = ["Asked", "Rollout", "VectorRollout", "make_rollout", "native_rollout"]


@dataclass(frozen=True)
class Asked:
    """What a rollout of a control run is made from.

    Attributes:
        config: the job.
        copies: of the environment, seeded; None where the workers make their own.
        agent: the live policy; its weights are used as they are at each rollout.
        device: of the policy and of the batches.
        seed: of the environments.
        online: transforms that act at every step.
        say: takes a line about a choice that was made for the user.
    """

    config: Config
    copies: EnvBase | None
    agent: Agent
    device: torch.device
    seed: int
    online: tuple[Transform, ...] = ()
    say: Callable[[str], None] = print


def make_rollout(asked: Asked) -> Rollout:
    """The choice of ``collector``."""
    return factory("collector", asked.config.collector, CONTROL)(asked)


def vector_rollout(asked: Asked) -> Rollout:
    """``collector=vector``; TorchRL's where an environment is not for the native loop."""
    env = transformed(_here(asked), asked.online)
    return native_rollout(env, asked.agent, asked.config.collector.steps, asked.device, asked.say)


def native_rollout(
    env: TransformedEnv,
    agent: Agent,
    steps: int,
    device: torch.device,
    say: Callable[[str], None] = print,
) -> Rollout:
    """The native loop over an environment, or TorchRL's collector where it has no plan for it.

    Args:
        env: whose copies are stepped.
        agent: the live policy.
        steps: T.
        device: of the policy and of the batches.
        say: told why it is not the native loop.
    """
    plan = make_plan(env)
    if isinstance(plan, str):
        say(f"collector=vector: {plan}; TorchRL's collector is used")
        return stock_rollout(env, agent, steps, device)
    return VectorRollout(env, agent, steps, device)


def torchrl_rollout(asked: Asked) -> Rollout:
    """``collector=torchrl``."""
    env = transformed(_here(asked), asked.online)
    return stock_rollout(env, asked.agent, asked.config.collector.steps, asked.device)


def stock_rollout(env: TransformedEnv, agent: Agent, steps: int, device: torch.device) -> Rollout:
    """TorchRL's collector; arguments as :func:`native_rollout`."""
    from klrl.control.torchrl_rollout import (
        TorchRLRollout,  # which imports all of TorchRL's collectors
    )

    return TorchRLRollout(env, agent.actor, steps, device)


def _here(asked: Asked) -> EnvBase:
    assert asked.copies is not None
    return asked.copies
