"""The KL to the reference: the choice of pi_ref, the penalty, the controller of ``kl.coef``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, choice, number
from klrl.config.placement import ESTIMATORS, PLACEMENTS


@dataclass
class ReferenceConfig(ChoiceConfig):
    """The policy at the start of training."""


@dataclass
class CheckpointReferenceConfig(ReferenceConfig):
    """A policy that another run trained."""

    path: str = MISSING
    which: str = choice("last", "best")


@dataclass
class EMAReferenceConfig(ReferenceConfig):
    """A moving average of the policy."""

    decay: float = number(ge=0, le=1)


@dataclass
class PeriodicReferenceConfig(ReferenceConfig):
    """The policy as it was some iterations ago."""

    every: int = number(ge=1)


@dataclass
class KLConfig(ChoiceConfig):
    """No KL to a reference: no measurement, no penalty."""


@dataclass
class LegacyKLConfig(KLConfig):
    """One transform with the sampled log-ratio (k1) in the reward."""

    coef: float = number(ge=0)
    apply: str = choice("rollout", "step")


@dataclass
class RetrieveKLConfig(LegacyKLConfig):
    """Log-prob retrieval twice, then the KL computation."""

    estimator: str = choice(*ESTIMATORS)
    placement: str = choice(*PLACEMENTS)
    allow_biased: bool = MISSING


@dataclass
class ControllerConfig(ChoiceConfig):
    """A fixed kl.coef."""


@dataclass
class ScheduleControllerConfig(ControllerConfig):
    """kl.coef moves with the frames."""

    shape: str = choice("linear", "cosine")
    end: float = number(ge=0)
    frames: Any = number(gt=0, whole=True)


@dataclass
class AdaptiveControllerConfig(ControllerConfig):
    """kl.coef is multiplied towards a target KL."""

    target: float = number(gt=0)
    horizon: Optional[float] = number(gt=0)  # noqa: UP045 (OmegaConf reads this annotation)
    coef_min: float = number(gt=0)
    coef_max: float = number(gt=0)


@dataclass
class DualControllerConfig(ControllerConfig):
    """log kl.coef ascends on the constraint KL <= target."""

    target: float = number(gt=0)
    lr: float = number(gt=0)
    coef_min: float = number(gt=0)
    coef_max: float = number(gt=0)
