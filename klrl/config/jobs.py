"""The settings as Hydra composes them, and the typed job of each kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from klrl.config.choices import CONTROL, LANGUAGE
from klrl.config.control import ActorConfig, CollectorConfig, EnvConfig
from klrl.config.fields import number
from klrl.config.kl import ControllerConfig, KLConfig, ReferenceConfig
from klrl.config.language import CausalLMConfig, LanguageEnvConfig, SamplerConfig
from klrl.config.learning import (
    AdvantageConfig,
    GroupConfig,
    LearnerConfig,
    LossConfig,
    OptimConfig,
)
from klrl.config.record import CheckpointConfig, EvalConfig, LoggerConfig


@dataclass
class RootConfig:
    """The settings outside any group."""

    frames: Any = number(gt=0, whole=True, optional=False)
    seed: int = number(ge=0)
    device: str = MISSING
    threads: int = number(ge=1, le=4096)
    resume: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    env: Any = None
    actor: Any = None
    reference: Any = None
    kl: Any = None
    controller: Any = None
    advantage: Any = None
    loss: Any = None
    learner: Any = None
    optim: Any = None
    collector: Any = None
    logger: Any = None


@dataclass
class JobConfig(ABC):
    """The settings that control and language jobs share, checked and typed."""

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
    env: Any
    actor: Any
    advantage: Any
    collector: Any

    #: The name of its domain in :mod:`klrl.domains`.
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
    def iterations(self) -> int:
        """Rollouts that cover ``frames``, the last one whole."""
        return math.ceil(self.frames / self.frames_per_iteration)

    @property
    def gradient_steps(self) -> int:
        """Minibatches over the whole run."""
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

    @property
    def frames_per_iteration(self) -> int:
        """Responses in one rollout: prompts x group_size."""
        return self.collector.prompts * self.collector.group_size

    @property
    def title(self) -> str:
        """Task and reward."""
        return f"{self.env.name}, reward {self.env.reward}"


#: domain -> its job
JOBS: dict[str, type[Config] | type[LanguageConfig]] = {CONTROL: Config, LANGUAGE: LanguageConfig}
