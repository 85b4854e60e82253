"""Declares settings of both domains: the reference, the KL penalty, the controller of kl.coef."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from omegaconf import MISSING
from pydantic import Field

from klrl.config.choices import registered
from klrl.config.fields import (
    ChoiceConfig,
    Count,
    NonNegative,
    OwnPart,
    Part,
    Place,
    Positive,
    Share,
    Unit,
    Whole,
    one_of,
    setting,
)
from klrl.config.placement import DIVERGENCES, ESTIMATORS, OWN, PLACEMENTS

#: The file that declares the values of estimator, placement and divergence.
_LISTS = "klrl/config/placement.py"


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

    path: Place = MISSING  # the run folder
    which: Literal["last", "best"] = "last"  # the checkpoint: last or best


@registered("reference", "model", language="kl.reference:OtherPolicyReference")
class ModelReferenceConfig(ReferenceConfig):
    """A model from a folder, as in reference=model reference.path=FOLDER."""

    #: a folder of save_pretrained, a hub id, or smollm2; its vocabulary must equal the policy's
    path: Place = MISSING


@registered("reference", "custom", control="kl.reference:OtherPolicyReference")
class CustomReferenceConfig(OwnPart, ReferenceConfig):
    """A custom policy: reference.target=package.module:Name."""


@registered("reference", "ema", both="kl.reference:EMAReference")
class EMAReferenceConfig(ReferenceConfig):
    """An exponential moving average of the policy."""

    decay: Share = 0.99  # each iteration keeps this share of the old average


@registered("reference", "periodic", both="kl.reference:PeriodicReference")
class PeriodicReferenceConfig(ReferenceConfig):
    """A copy of the policy, renewed at intervals."""

    every: Count = 10  # iterations between two copies


@registered("kl", "none", control="control.run.kl:no_kl", language="language.run.kl:no_kl")
class KLConfig(ChoiceConfig):
    """No reference, so no KL is measured or charged."""

    #: language, KLs over the whole vocabulary: always, charged (where the penalty is one) or
    #: every:N (rollouts); elsewhere estimates by k3, and pi_old's hidden states are not kept
    exact: str = setting("always", added=True)

    @property
    def coef_from_reward(self) -> bool:
        """Whether the coefficient follows from the first reward (``kl.coef=null``)."""
        return False


@registered("kl", "legacy", control="control.run.kl:legacy", language="language.run.kl:legacy")
class LegacyKLConfig(KLConfig):
    """One transform, which charges the sampled log-ratio (k1) to the reward."""

    #: penalty per nat of KL(policy||reference); 0: only measure; null: from the first rollout, what
    #: a step earns, so that .1 nats cost a tenth of it
    coef: NonNegative | None = 0.1
    #: charge the batch (rollout), or in the environment (step; language: TorchRL's ChatEnv, slow)
    apply: Literal["rollout", "step"] = "rollout"

    @property
    def coef_from_reward(self) -> bool:
        """Whether the coefficient follows from the first reward (``kl.coef=null``)."""
        return self.coef is None

    @property
    def first_coef(self) -> float:
        """The coefficient in the first rollout."""
        return 0.0 if self.coef is None else self.coef


@registered(
    "kl", "retrieve", control="control.run.kl:retrieve", language="language.run.kl:retrieve"
)
class RetrieveKLConfig(LegacyKLConfig):
    """Three transforms: log-probs of the policy, those of the reference, and the KL."""

    #: k1, k2, k3 (sampled), exact, or custom: own_estimator; in the reward only k1 is unbiased
    estimator: Annotated[str, one_of((*ESTIMATORS, OWN), _LISTS)] = "k1"
    #: reward; loss (own step only); split (exact: own step in the loss, all steps in the reward)
    placement: Annotated[str, one_of(PLACEMENTS, _LISTS)] = "reward"
    allow_biased: bool = False  # true: accept a gradient that differs from the KL's
    #: reverse: KL(policy||reference); forward, js or custom need estimator=exact, in loss or split
    divergence: Annotated[str, one_of((*DIVERGENCES, OWN), _LISTS)] = setting("reverse", added=True)
    #: divergence=js or custom of Gaussians: samples per state (js: from each of both policies)
    samples_mc_js: Annotated[Whole, Field(ge=2)] = setting(16, added=True)
    #: estimator=custom: own_estimator.target=package.module:function of log_ratio
    own_estimator: Part = setting(None, added=True, own=True)
    #: divergence=custom: own_divergence.target=...; actions that the policy never takes are ignored
    own_divergence: Part = setting(None, added=True, own=True)


@registered("controller", "fixed", both="kl.controllers:FixedKLController")
class ControllerConfig(ChoiceConfig):
    """Keeps kl.coef constant."""


@registered("controller", "schedule", both="kl.controllers:ScheduledKLController")
class ScheduleControllerConfig(ControllerConfig):
    """Changes kl.coef to a second value over the frames."""

    shape: Literal["linear", "cosine"] = "linear"  # linear or cosine
    end: NonNegative = 0.0  # coefficient at the end
    frames: Count | None = None  # frames until the end; null = the whole run


@dataclass
class TargetControllerConfig(ControllerConfig):
    """Multiplies kl.coef so that the KL approaches a target."""

    target: Positive = 0.1  # target of KL(policy||reference), in nats per unit
    #: step (control), token (mean) or sequence (sum over a response); null = step or token
    unit: Unit | None = setting(None, added=True)
    coef_min: Positive = 1e-4  # kl.coef never falls below this
    coef_max: Positive = 1e4  # kl.coef never rises above this


@registered("controller", "adaptive", both="kl.controllers:AdaptiveKLController")
class AdaptiveControllerConfig(TargetControllerConfig):
    """Multiplies kl.coef to bring KL(policy||reference) to a target (Ziegler et al. 2019)."""

    #: frames in which kl.coef may change by a fifth; null: ten rollouts
    horizon: Positive | None = None


@registered("controller", "dual", both="kl.controllers:DualKLController")
class DualControllerConfig(TargetControllerConfig):
    """Dual ascent in log kl.coef on the constraint KL(policy||reference) <= target."""

    lr: Positive = 0.1  # ln coef += lr * (KL / target - 1), per iteration


@registered("controller", "held", both="kl.controllers:HeldKLController")
class HeldControllerConfig(TargetControllerConfig):
    """PI control of log kl.coef towards a target KL; the gains fall if the KL oscillates."""

    integral: NonNegative = 0.2  # ln coef += integral * (KL / target - 1), per iteration
    proportional: NonNegative = 2.0  # ln coef += proportional * change of KL / target
    limit: Positive = 1.0  # bounds KL / target - 1 (integral: at up to 16 limit)


@registered("controller", "custom", both="kl.controllers:OwnKLController")
class CustomControllerConfig(OwnPart, ControllerConfig):
    """A custom controller: controller.target=package.module:Name."""
