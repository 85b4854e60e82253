"""What ``collector=ray`` asks of the other settings. No torch in here."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import Config, LegacyKLConfig, RayCollectorConfig


def check_ray(c: Config, collector: RayCollectorConfig) -> None:
    """Refuse settings that the workers cannot share or serve.

    Raises:
        ConfigError: with the setting, its value and the remedy.
    """
    if c.env.num_envs % collector.workers:
        raise ConfigError(
            f"collector.workers={collector.workers}: does not divide env.num_envs="
            f"{c.env.num_envs}, and every worker plays as many copies; choose a divisor"
        )
    if isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(
            "kl.apply=step: with collector=ray the reference stays with the learner; use "
            "kl.apply=rollout, whose numbers are the same"
        )
