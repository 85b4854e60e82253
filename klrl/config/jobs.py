"""The typed job of each domain."""

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
    GroupConfig,
    LearnerConfig,
    LossConfig,
    OptimConfig,
)
from klrl.config.schemas.penalty import ControllerConfig, KLConfig, ReferenceConfig
from klrl.config.schemas.record import CheckpointConfig, EvalConfig, LoggerConfig


@dataclass
class JobConfig(Settings, ABC):
    """The settings that the jobs of both domains share, checked and typed."""

    frames: int
    seed: int
    device: str
    threads: int
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
        """Frames (language: samples) in one rollout."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The task's name in titles."""

    @property
    def has_reference(self) -> bool:
        """Whether KL(policy||reference) is measured; with ``kl=none`` there is no reference."""
        return self.kl.name != "none"

    @property
    def iterations(self) -> int:
        """Whole rollouts that together cover at least ``frames``."""
        return math.ceil(self.frames / self.frames_per_iteration)

    @property
    def gradient_steps(self) -> int:
        """Gradient steps, one per minibatch, over the whole run."""
        return self.iterations * self.learner.epochs * self.learner.minibatches


@dataclass
class Config(JobConfig):
    """One control job."""

    env: EnvConfig
    actor: ActorConfig
    advantage: AdvantageConfig
    collector: CollectorConfig

    domain = CONTROL

    @property
    def frames_per_iteration(self) -> int:
        """Frames in one rollout: num_envs x steps."""
        return self.env.num_envs * self.collector.steps

    @property
    def title(self) -> str:
        """The environment's id."""
        return self.env.id


@dataclass
class LanguageConfig(JobConfig):
    """One language job; its frames are samples: responses to prompts."""

    env: LanguageEnvConfig
    actor: CausalLMConfig
    advantage: AdvantageConfig | GroupConfig
    collector: SamplerConfig

    domain = LANGUAGE

    def __post_init__(self) -> None:
        if self.loss.reduction == "mean":  # the domain's mean is over tokens
            self.loss = replace(self.loss, reduction="token")

    @property
    def frames_per_iteration(self) -> int:
        """Responses in one rollout: prompts x group_size."""
        return self.collector.prompts * self.collector.group_size

    @property
    def title(self) -> str:
        """Task and reward."""
        return f"{self.env.name}, reward {' + '.join(self.env.rewards)}"

    @property
    def mixed(self) -> bool:
        """Whether float32 weights are trained with bfloat16 arithmetic.

        True with ``learner.dtype=mixed``, and for a bfloat16 actor without adapters: bfloat16
        weights are spaced too widely for an Adam step of 1e-6.
        """
        whole = self.actor.lora.r == 0
        return self.learner.dtype == "mixed" or (whole and self.actor.dtype == "bfloat16")


#: The ``env`` settings of any job.
Env = EnvConfig | LanguageEnvConfig

#: domain -> the class of its jobs
JOBS: dict[str, type[Config] | type[LanguageConfig]] = {CONTROL: Config, LANGUAGE: LanguageConfig}
