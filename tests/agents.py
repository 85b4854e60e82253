"""Environments, policies and what they moved away from, for tests of control and of transforms."""

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import EnvBase, Transform, TransformedEnv

from klrl.config import EnvConfig, GaussianActorConfig
from klrl.control.env.copies import make_copies, transformed
from klrl.control.policy.actor import make_agent
from klrl.control.policy.networks import Agent
from klrl.kl import freeze
from klrl.train.loop import Training


def gym(env_id: str, num_envs: int = 2, **kwargs: object) -> EnvConfig:
    return EnvConfig(env_id, kwargs, num_envs, True, 1.0, name="gym")


def make_env(
    config: EnvConfig, *, seed: int, transforms: tuple[Transform, ...] = ()
) -> TransformedEnv:
    """The environment of a rollout."""
    return transformed(make_copies(config, seed=seed), transforms)


def agent_of(
    env: EnvBase,
    name: str = "mlp",
    hidden: tuple[int, ...] = (8,),
    activation: str = "tanh",
    share: bool = False,
    *,
    init_std: float = 1.0,
    normalize: bool = True,
    separate: bool = False,
) -> Agent:
    config = GaussianActorConfig(list(hidden), activation, share, init_std=init_std, name=name)
    return make_agent(config, env, normalize=normalize, separate=separate)


def moved(module: nn.Module, by: float = 0.3) -> nn.Module:
    """With noise of this scale on all weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return module


def apart(actor: nn.Module, by: float = 0.3) -> tuple[nn.Module, nn.Module]:
    """(the policy, the reference that it moved away from)."""
    reference = freeze(actor)
    return moved(actor, by), reference


def moved_rollout(training: Training, by: float) -> TensorDictBase:
    """A batch that is not charged yet, after noise of this scale on all weights."""
    moved(training.parts.agent.modules, by)
    rollout = training.parts.rollout(0)
    batch = rollout.collect()
    rollout.close()
    return batch
