"""Both domains: advantage, policy loss, learner, optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part


@dataclass
class AdvantageConfig(ChoiceConfig):
    """Generalised advantage estimation."""

    gamma: float = number(ge=0, le=1)
    lmbda: float = number(ge=0, le=1)
    reward_weight: float = added(number(ge=0), 1.0)


@dataclass
class CustomAdvantageConfig(OwnPart, AdvantageConfig):
    """A custom estimate."""


#: ``advantage.baseline`` that divides score and KL by the spread of the group's scores.
SHAPED = "normalized_shaped"


@dataclass
class GroupConfig(ChoiceConfig):
    """A baseline from the scores of a prompt's group of responses."""

    baseline: str = choice("normalized", SHAPED, "mean", "leave_one_out")
    reward_weight: float = added(number(ge=0), 1.0)


@dataclass
class LossConfig(ChoiceConfig):
    """The settings that all policy losses share."""

    entropy_bonus: bool = MISSING
    entropy_coeff: float = number(ge=0)
    samples_mc_entropy: int = number(ge=1)
    critic_coeff: float = number(ge=0)
    loss_critic_type: str = choice("l1", "l2", "smooth_l1")
    clip_value: Optional[float] = number(gt=0)  # noqa: UP045
    normalize_advantage: bool = MISSING
    separate_losses: bool = MISSING
    reduction: str = choice("mean", "sum", "token", "response", "sequence")
    mask_truncated: bool = added(field(default=MISSING), False)


@dataclass
class KLPENConfig(LossConfig):
    """PPO with a KL(old||new) penalty whose coefficient beta follows a rule."""

    dtarg: float = number(gt=0)
    dtarg_end: Optional[float] = added(number(gt=0), None)  # noqa: UP045
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)  # noqa: UP045
    beta: float = number(ge=0)
    increment: float = number(ge=1)
    decrement: float = number(gt=0, le=1)
    beta_rule: str = choice("doubling", "proportional", "forward", "custom")
    gain: float = number(gt=0)
    line_search: str = choice("none", "back", "both")
    max_alpha: float = added(number(ge=1), 2.0)
    beta_min: float = number(gt=0)
    beta_max: float = number(gt=0)
    kl_old: str = choice("exact", "sampled")
    samples_mc_kl: int = number(ge=1)
    # Any: an OwnPart, or None.
    own_beta_rule: Any = own_part()


@dataclass
class ClipConfig(LossConfig):
    """PPO with a clipped ratio."""

    clip_epsilon: float = number(gt=0)
    clip_epsilon_high: Optional[float] = added(number(gt=0), None)  # noqa: UP045
    target_kl: Optional[float] = number(gt=0)  # noqa: UP045
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)  # noqa: UP045


@dataclass
class CustomLossConfig(OwnPart, LossConfig):
    """A custom policy loss, next to the terms that all losses share."""


@dataclass
class LearnerConfig(ChoiceConfig):
    """Epochs over one rollout, each split into minibatches."""

    epochs: int = number(ge=1)
    minibatches: int = number(ge=1)
    # Any: YAML reads a bare false as a boolean.
    compile: Any = choice("auto", "false", "jit", "aot")
    dtype: Optional[str] = added(choice("float32", "mixed", optional=True), None)  # noqa: UP045
    micro_batch: Optional[int] = added(number(ge=1), None)  # noqa: UP045


@dataclass
class OptimConfig(ChoiceConfig):
    """Adam."""

    lr: float = number(gt=0)
    lr_floor: float = number(ge=0)
    eps: float = number(gt=0)
    max_grad_norm: float = number(gt=0)


@dataclass
class AdamWConfig(OptimConfig):
    """Adam with decoupled weight decay."""

    weight_decay: float = number(ge=0)
