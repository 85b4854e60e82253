"""Declares settings of both domains: the reference, the KL penalty, the controller of kl.coef."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from omegaconf import MISSING

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part, setting
from klrl.config.placement import DIVERGENCES, ESTIMATORS, OWN, PLACEMENTS
from klrl.config.types import Part, Whole


@registered(
    *("reference", "adapter_off", "the model without adapters"),
    language="kl.reference:AdapterOffReference",
)
@registered("reference", "initial", both="kl.reference:ReferenceRule")
class ReferenceConfig(ChoiceConfig):
    """The policy at the start of this run, with its own normaliser."""


@registered("reference", "checkpoint", both="kl.reference:OtherPolicyReference")
class CheckpointReferenceConfig(ReferenceConfig):
    """The policy of another run, as in reference=checkpoint reference.path=outputs/NAME."""

    path: str = MISSING  # the run folder
    which: str = choice("last", "best")  # the checkpoint: last or best


@registered("reference", "model", language="kl.reference:OtherPolicyReference")
class ModelReferenceConfig(ReferenceConfig):
    """A model from a folder, as in reference=model reference.path=FOLDER."""

    #: a folder of save_pretrained, a hub id, or smollm2; its vocabulary must equal the policy's
    path: str = MISSING


@registered("reference", "custom", control="kl.reference:OtherPolicyReference")
class CustomReferenceConfig(OwnPart, ReferenceConfig):
    """A policy of your own: reference.target=package.module:Name."""


@registered("reference", "ema", both="kl.reference:EMAReference")
class EMAReferenceConfig(ReferenceConfig):
    """An exponential moving average of the policy."""

    decay: float = number(0.99, ge=0, le=1)  # each iteration keeps this share of the old average


@registered("reference", "periodic", both="kl.reference:PeriodicReference")
class PeriodicReferenceConfig(ReferenceConfig):
    """A copy of the policy, renewed at intervals."""

    every: int = number(10, ge=1)  # iterations between two copies


@registered("kl", "none", control="control.run.kl:no_kl", language="language.run.kl:no_kl")
class KLConfig(ChoiceConfig):
    """No reference, so no KL is measured or charged."""


@registered("kl", "legacy", control="control.run.kl:legacy", language="language.run.kl:legacy")
class LegacyKLConfig(KLConfig):
    """One transform, which charges the sampled log-ratio (k1) to the reward."""

    coef: float = number(0.1, ge=0)  # penalty per nat of KL(policy||reference); 0: only measure
    #: charge the batch (rollout), or in the environment (step; language: TorchRL's ChatEnv, slow)
    apply: str = choice("rollout", "step")


@registered(
    "kl", "retrieve", control="control.run.kl:retrieve", language="language.run.kl:retrieve"
)
class RetrieveKLConfig(LegacyKLConfig):
    """Three transforms: log-probs of the policy, those of the reference, and the KL."""

    #: k1, k2, k3 (sampled), exact, or custom: own_estimator; in the reward only k1 is unbiased
    estimator: str = choice(*ESTIMATORS, OWN, declared_in="klrl/config/placement.py")
    #: reward; loss (own step only); split (exact: own step in the loss, all steps in the reward)
    placement: str = choice(*PLACEMENTS)
    allow_biased: bool = setting(False)  # true: accept a gradient that differs from the KL's
    #: reverse: KL(policy||reference); forward, js or custom need estimator=exact, in loss or split
    divergence: str = added(choice(*DIVERGENCES, OWN), "reverse")
    #: divergence=js or custom of Gaussians: samples per state (js: from each of both policies)
    samples_mc_js: int = added(number(ge=2), 16)
    #: estimator=custom: own_estimator.target=package.module:function of log_ratio
    own_estimator: Part = own_part()
    #: divergence=custom: own_divergence.target=...; actions that the policy never takes are ignored
    own_divergence: Part = own_part()


@registered("controller", "fixed", both="kl.controllers:FixedKLController")
class ControllerConfig(ChoiceConfig):
    """Keeps kl.coef constant."""


@registered("controller", "schedule", both="kl.controllers:ScheduledKLController")
class ScheduleControllerConfig(ControllerConfig):
    """Changes kl.coef to a second value over the frames."""

    shape: str = choice("linear", "cosine")  # linear or cosine
    end: float = number(0.0, ge=0)  # coefficient at the end
    frames: Whole = number(None, gt=0, whole=True)  # frames until the end; null = the whole run


@dataclass
class TargetControllerConfig(ControllerConfig):
    """Multiplies kl.coef so that the KL approaches a target."""

    target: float = number(0.1, gt=0)  # target of KL(policy||reference), in nats per unit
    #: step (control), token (mean) or sequence (sum over a response); null = step or token
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)
    coef_min: float = number(1e-4, gt=0)  # kl.coef never falls below this
    coef_max: float = number(1e4, gt=0)  # kl.coef never rises above this


@registered("controller", "adaptive", both="kl.controllers:AdaptiveKLController")
class AdaptiveControllerConfig(TargetControllerConfig):
    """Multiplies kl.coef to bring KL(policy||reference) to a target (Ziegler et al. 2019)."""

    #: frames in which kl.coef may change by a fifth; null: ten rollouts
    horizon: Optional[float] = number(None, gt=0)


@registered("controller", "dual", both="kl.controllers:DualKLController")
class DualControllerConfig(TargetControllerConfig):
    """Dual ascent in log kl.coef on the constraint KL(policy||reference) <= target."""

    lr: float = number(0.1, gt=0)  # ln coef += lr * (KL / target - 1), per iteration


@registered("controller", "held", both="kl.controllers:HeldKLController")
class HeldControllerConfig(TargetControllerConfig):
    """PI control of log kl.coef towards a target KL; the gains fall if the KL oscillates."""

    integral: float = number(0.2, ge=0)  # ln coef += integral * (KL / target - 1), per iteration
    proportional: float = number(2.0, ge=0)  # ln coef += proportional * change of KL / target
    limit: float = number(1.0, gt=0)  # bounds KL / target - 1 (integral: at up to 16 limit)


@registered("controller", "custom", both="kl.controllers:OwnKLController")
class CustomControllerConfig(OwnPart, ControllerConfig):
    """A controller of your own: controller.target=package.module:Name."""
