"""Make the batched environment of the chosen ``env``."""

from __future__ import annotations

from torchrl.envs import Compose, EnvBase, RewardSum, StepCounter, Transform, TransformedEnv

from klrl.config import CONTROL, CustomEnvConfig, EnvConfig, factory
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.gym_make import make_one


def make_copies(config: EnvConfig, *, seed: int, num_envs: int | None = None) -> VectorGymEnv:
    """Make the copies of the chosen ``env`` as one batched environment."""
    copies: VectorGymEnv = factory("env", config, CONTROL)(config, seed=seed, num_envs=num_envs)
    return copies


def gym(config: EnvConfig, *, seed: int, num_envs: int | None = None) -> VectorGymEnv:
    """``env=gym`` and ``env=custom``; arguments as in :func:`make_copies`."""
    return VectorGymEnv(
        config.id,
        num_envs or config.num_envs,
        seed=seed,
        step_timeout=config.step_timeout,
        make=lambda: make_one(config),
        setting=config.named,
        action_mask=config.action_mask,
        channels=config.channels,
        # The user's function may build a different simulator for each copy.
        batch=not isinstance(config, CustomEnvConfig),
    )


custom = gym


def transformed(copies: EnvBase, transforms: tuple[Transform, ...] = ()) -> TransformedEnv:
    """Add the transforms of a rollout to the copies.

    The transforms for an episode's return (``episode_reward``) and length (``step_count``) come
    first, so that the return sums the raw reward even if ``transforms`` subtract a KL.
    """
    return TransformedEnv(copies, Compose(RewardSum(), StepCounter(), *transforms))


def make_env(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    transforms: tuple[Transform, ...] = (),
) -> TransformedEnv:
    """Make copies by :func:`make_copies`, and add ``transforms`` by :func:`transformed`."""
    return transformed(make_copies(config, seed=seed, num_envs=num_envs), transforms)
