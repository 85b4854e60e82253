"""``kl``, ``reference``, and the advantage's settings of the KL against other settings.

Which estimator and divergence may be charged where: ``klrl/config/placement.py``.
"""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import (
    Config,
    GroupConfig,
    JobConfig,
    LanguageConfig,
    LegacyKLConfig,
    RayCollectorConfig,
    RetrieveKLConfig,
)
from klrl.config.placement import OWN, check_divergence, check_placement
from klrl.config.schemas.learning import SHAPED


def check_charged(c: JobConfig) -> None:
    """Estimator, divergence and placement go together."""
    if isinstance(c.kl, RetrieveKLConfig):
        for name in ("estimator", "divergence"):
            if getattr(c.kl, name) == OWN and getattr(c.kl, f"own_{name}") is None:
                raise ConfigError(
                    f"kl.{name}=custom: which one? add kl.own_{name}.target=package.module:name"
                )
        check_divergence(c.kl.divergence, c.kl.placement, c.kl.estimator)
        check_placement(c.kl.placement, c.kl.estimator, c.kl.allow_biased)


def check_step_divergence(c: JobConfig) -> None:
    """The environment knows one divergence."""
    divergence = getattr(c.kl, "divergence", "reverse")
    if divergence != "reverse" and getattr(c.kl, "apply", "rollout") == "step":
        raise ConfigError(
            f"kl.apply=step: charges the reverse KL alone; with kl.divergence={divergence} use "
            "kl.apply=rollout"
        )


def check_ray_step(c: Config) -> None:
    """A KL that Ray's workers cannot compute."""
    ray = isinstance(c.collector, RayCollectorConfig)
    if ray and isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(
            "kl.apply=step: with collector=ray the reference stays with the learner; use "
            "kl.apply=rollout, which gives the same numbers"
        )


def check_language_step(c: LanguageConfig) -> None:
    """A response has no steps to charge one by one."""
    if getattr(c.kl, "apply", "rollout") == "step":
        raise ConfigError(
            "kl.apply=step: the KL of a response is known when it is complete; use kl.apply=rollout"
        )


def check_reward_weight(c: JobConfig) -> None:
    """Without the reward, the penalty must be there."""
    charged = getattr(c.kl, "coef", 0) > 0 or getattr(c.controller, "end", 0) > 0  # of schedule
    if c.advantage.reward_weight == 0 and not (c.has_reference and charged):
        what = "kl.coef=0" if c.has_reference else "kl=none"
        raise ConfigError(
            f"advantage.reward_weight=0: with {what} there is nothing to learn from; "
            "use kl=retrieve kl.coef=1"
        )


def check_shaped(c: LanguageConfig) -> None:
    """The spread divides a KL that stands in the advantage, and that one alone."""
    if not isinstance(c.advantage, GroupConfig) or c.advantage.baseline != SHAPED:
        return
    words = f"advantage.baseline={SHAPED}: divides score and KL by the spread of the group, and"
    if not c.has_reference:
        raise ConfigError(f"{words} kl=none has no KL; choose advantage.baseline=normalized")
    placement = getattr(c.kl, "placement", "reward")
    if placement != "reward":
        raise ConfigError(
            f"{words} kl.placement={placement} charges it in the loss, undivided; choose "
            "kl.placement=reward or advantage.baseline=leave_one_out"
        )


def check_adapter_off(c: LanguageConfig) -> None:
    """A reference without adapters is that of a policy with adapters."""
    if c.reference.name == "adapter_off" and c.actor.lora.r == 0 and c.has_reference:
        raise ConfigError(
            "reference=adapter_off: actor.lora.r=0 has no adapters to switch off; set "
            "actor.lora.r=8, or choose reference=initial"
        )
