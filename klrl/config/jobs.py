"""Defines the job of each domain: a dataclass of typed settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from klrl.config.choices import CONTROL, LANGUAGE
from klrl.config.fields import Settings
from klrl.config.schemas.control import ActorConfig, CollectorConfig, EnvConfig
from klrl.config.schemas.language import CausalLMConfig, LanguageEnvConfig, SamplerConfig
from klrl.config.schemas.learning import (
    AdvantageConfig,
    ClipConfig,
    GroupConfig,
    LearnerConfig,
    LossConfig,
    OptimConfig,
)
from klrl.config.schemas.penalty import ControllerConfig, KLConfig, ReferenceConfig
from klrl.config.schemas.record import CheckpointConfig, EvalConfig, LoggerConfig


@dataclass
class JobConfig(Settings, ABC):
    """The settings of a job in either domain, typed and checked."""

    frames: int
    seed: int
    device: str
    threads: int
    rank_timeout: float
    eval: EvalConfig
    checkpoint: CheckpointConfig
    reference: ReferenceConfig
    kl: KLConfig
    controller: ControllerConfig
    loss: LossConfig
    learner: LearnerConfig
    optim: OptimConfig
    logger: LoggerConfig
    env: EnvConfig | LanguageEnvConfig
    actor: ActorConfig | CausalLMConfig
    advantage: AdvantageConfig | GroupConfig
    collector: CollectorConfig | SamplerConfig

    #: The job's domain, a key of :data:`klrl.domains.DOMAINS`.
    domain: ClassVar[str]

    @property
    @abstractmethod
    def frames_per_iteration(self) -> int:
        """Number of frames in one rollout; a language job's frames are samples."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the task, for the titles of charts."""

    @property
    def has_reference(self) -> bool:
        """Whether the job has a reference; with ``kl=none`` it has none."""
        return self.kl.name != "none"

    @property
    def iterations(self) -> int:
        """The smallest number of whole rollouts with at least ``frames`` frames."""
        return math.ceil(self.frames / self.frames_per_iteration)

    @property
    def gradient_steps(self) -> int:
        """Number of gradient steps, one per minibatch, in the whole run."""
        return self.iterations * self.learner.epochs * self.learner.minibatches

    @property
    def sampled_elsewhere(self) -> bool:
        """Whether a policy that is not the one before the update samples the rollouts."""
        return self.collector.staleness > 0

    @property
    def anchor(self) -> str:
        """``loss.anchor`` of the job: the policy in the ratio's denominator, old or sampler."""
        if self.loss.name == "dppo":
            return "sampler"
        if not isinstance(self.loss, ClipConfig):
            return "old"
        stale = self.collector.staleness > 0 and self.loss.sampler_weight is None
        return self.loss.anchor or ("sampler" if stale else "old")

    @property
    def corrects_sampler(self) -> bool:
        """Whether the loss weights each position by pi_theta / mu, perhaps within limits."""
        return self.loss.sampler_weight is not None or self.anchor == "sampler"

    @property
    def reads_sampler(self) -> bool:
        """Whether the job measures the sampler, mu, as a policy of its own."""
        return self.sampled_elsewhere or self.corrects_sampler


@dataclass
class Config(JobConfig):
    """A control job."""

    env: EnvConfig
    actor: ActorConfig
    advantage: AdvantageConfig
    collector: CollectorConfig

    domain = CONTROL

    @property
    def frames_per_iteration(self) -> int:
        """Frames in one rollout: ``env.num_envs`` x ``collector.steps``."""
        return self.env.num_envs * self.collector.steps

    @property
    def title(self) -> str:
        """The environment's id."""
        return self.env.id


@dataclass
class LanguageConfig(JobConfig):
    """A language job; its frames are samples, the responses to prompts."""

    env: LanguageEnvConfig
    actor: CausalLMConfig
    advantage: AdvantageConfig | GroupConfig
    collector: SamplerConfig

    domain = LANGUAGE

    def __post_init__(self) -> None:
        if self.loss.reduction == "mean":  # language jobs take the mean over tokens
            self.loss = replace(self.loss, reduction="token")

    @property
    def frames_per_iteration(self) -> int:
        """Responses in one rollout: ``collector.prompts`` x ``collector.group_size``."""
        return self.collector.prompts * self.collector.group_size

    @property
    def title(self) -> str:
        """The names of task and rewards."""
        return f"{self.env.name}, reward {' + '.join(self.env.rewards)}"

    @property
    def mixed(self) -> bool:
        """Whether float32 weights are trained with bfloat16 arithmetic.

        True with ``learner.dtype=mixed``, and for a bfloat16 actor without adapters, since an Adam
        step of 1e-6 is smaller than the spacing of bfloat16 weights.
        """
        whole = self.actor.lora.r == 0
        return self.learner.dtype == "mixed" or (whole and self.actor.dtype == "bfloat16")

    @property
    def sampled_elsewhere(self) -> bool:
        """Whether responses are sampled by older weights, or in another precision."""
        return super().sampled_elsewhere or self.collector.dtype is not None


#: The ``env`` settings of any job.
Env = EnvConfig | LanguageEnvConfig

#: domain -> the class of its jobs
JOBS: dict[str, type[Config] | type[LanguageConfig]] = {CONTROL: Config, LANGUAGE: LanguageConfig}
