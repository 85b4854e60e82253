"""The one place where an environment is made from its settings."""

from __future__ import annotations

from torchrl.envs import Compose, RewardSum, StepCounter, Transform, TransformedEnv

from klrl.config import EnvConfig
from klrl.envs.gym_vector import VectorGymEnv


def make_env(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    transforms: tuple[Transform, ...] = (),
) -> TransformedEnv:
    """Make the TransformedEnv of one process.

    Episode return (``episode_reward``) and length (``step_count``) come first, so that they count
    the raw reward even when a KL transform shapes it at every step.

    Args:
        config: the env group.
        seed: seed of the first reset.
        num_envs: overrides ``config.num_envs``, for evaluation.
        transforms: what must act online, as the KL with ``kl.apply=step``.
    """
    base = VectorGymEnv(
        config.id, num_envs or config.num_envs, kwargs=dict(config.kwargs), seed=seed
    )
    return TransformedEnv(base, Compose(RewardSum(), StepCounter(), *transforms))
