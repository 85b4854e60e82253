"""The one place where an environment is made from its settings."""

from __future__ import annotations

from torchrl.envs import Compose, EnvBase, RewardSum, StepCounter, Transform, TransformedEnv

from klrl.config import CONTROL, EnvConfig, factory
from klrl.control.gym_vector import VectorGymEnv


def make_copies(config: EnvConfig, *, seed: int, num_envs: int | None = None) -> EnvBase:
    """The copies of the chosen ``env``, as one batched environment.

    Args:
        config: the env group.
        seed: of the first reset.
        num_envs: overrides ``config.num_envs``, for evaluation.
    """
    return factory("env", config, CONTROL)(config, seed=seed, num_envs=num_envs)


def gym(config: EnvConfig, *, seed: int, num_envs: int | None = None) -> VectorGymEnv:
    """``env=gym``; arguments as :func:`make_copies`."""
    copies = num_envs or config.num_envs
    return VectorGymEnv(config.id, copies, kwargs=dict(config.kwargs), seed=seed)


def transformed(copies: EnvBase, transforms: tuple[Transform, ...] = ()) -> TransformedEnv:
    """The copies with the transforms that a run collects with.

    Episode return (``episode_reward``) and length (``step_count``) come first, so that they count
    the raw reward even when a KL transform shapes it at every step.

    Args:
        copies: from :func:`make_copies`.
        transforms: those that act at every step, as the KL's with ``kl.apply=step``.
    """
    return TransformedEnv(copies, Compose(RewardSum(), StepCounter(), *transforms))


def make_env(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    transforms: tuple[Transform, ...] = (),
) -> TransformedEnv:
    """:func:`make_copies`, then :func:`transformed`; their arguments."""
    return transformed(make_copies(config, seed=seed, num_envs=num_envs), transforms)
