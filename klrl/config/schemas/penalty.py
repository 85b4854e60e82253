"""Both domains: pi_ref, the penalty, the controller of kl.coef."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part
from klrl.config.placement import DIVERGENCES, ESTIMATORS, OWN, PLACEMENTS


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

    estimator: str = choice(*ESTIMATORS, OWN)
    placement: str = choice(*PLACEMENTS)
    allow_biased: bool = MISSING
    divergence: str = added(choice(*DIVERGENCES, OWN), "reverse")
    samples_mc_js: int = added(number(ge=2), 16)
    # Any: an OwnPart, or None.
    own_estimator: Any = own_part()
    own_divergence: Any = own_part()


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
class TargetControllerConfig(ControllerConfig):
    """kl.coef is multiplied towards a target KL, within bounds."""

    target: float = number(gt=0)
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)  # noqa: UP045
    coef_min: float = number(gt=0)
    coef_max: float = number(gt=0)


@dataclass
class AdaptiveControllerConfig(TargetControllerConfig):
    """By at most a fifth per horizon (Ziegler et al. 2019)."""

    horizon: Optional[float] = number(gt=0)  # noqa: UP045


@dataclass
class DualControllerConfig(TargetControllerConfig):
    """log kl.coef ascends on the constraint KL <= target."""

    lr: float = number(gt=0)


@dataclass
class HeldControllerConfig(TargetControllerConfig):
    """Proportional and integral gain on ln(KL / target)."""

    integral: float = number(ge=0)
    proportional: float = number(ge=0)
    limit: float = number(gt=0)


@dataclass
class CustomControllerConfig(OwnPart, ControllerConfig):
    """A custom controller."""
