"""The settings of a job, by group, with their types and ranges; values are in ``conf/``.

``control`` and ``language`` hold the groups of one domain; ``penalty``, ``learning`` and ``record``
those of both; what stands outside any group is here.

Where an annotation is ``Optional[...]`` and not ``... | None``, OmegaConf reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import number
from klrl.config.schemas.control import (
    ActorConfig,
    CNNActorConfig,
    CollectorConfig,
    CustomActorConfig,
    CustomEnvConfig,
    EnvConfig,
    GaussianActorConfig,
    RayCollectorConfig,
)
from klrl.config.schemas.language import (
    CausalLMConfig,
    InstructionsConfig,
    LanguageEnvConfig,
    LoraConfig,
    SamplerConfig,
    SortDigitsConfig,
    TextConfig,
)
from klrl.config.schemas.learning import (
    SHAPED,
    AdamWConfig,
    AdvantageConfig,
    ClipConfig,
    CustomAdvantageConfig,
    CustomLossConfig,
    GroupConfig,
    KLPENConfig,
    LearnerConfig,
    LossConfig,
    OptimConfig,
)
from klrl.config.schemas.penalty import (
    AdaptiveControllerConfig,
    CheckpointReferenceConfig,
    ControllerConfig,
    CustomControllerConfig,
    DualControllerConfig,
    EMAReferenceConfig,
    HeldControllerConfig,
    KLConfig,
    LegacyKLConfig,
    PeriodicReferenceConfig,
    ReferenceConfig,
    RetrieveKLConfig,
    ScheduleControllerConfig,
    TargetControllerConfig,
)
from klrl.config.schemas.record import (
    CheckpointConfig,
    CustomLoggerConfig,
    EvalConfig,
    LoggerConfig,
    WandbConfig,
)


@dataclass
class RootConfig:
    """The settings outside any group."""

    frames: Any = number(gt=0, whole=True, optional=False)
    seed: int = number(ge=0)
    device: str = MISSING
    threads: int = number(ge=1, le=4096)
    resume: Optional[str] = None  # noqa: UP045
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


__all__ = [
    "SHAPED",
    "ActorConfig",
    "AdamWConfig",
    "AdaptiveControllerConfig",
    "AdvantageConfig",
    "CNNActorConfig",
    "CausalLMConfig",
    "CheckpointConfig",
    "CheckpointReferenceConfig",
    "ClipConfig",
    "CollectorConfig",
    "ControllerConfig",
    "CustomActorConfig",
    "CustomAdvantageConfig",
    "CustomControllerConfig",
    "CustomEnvConfig",
    "CustomLoggerConfig",
    "CustomLossConfig",
    "DualControllerConfig",
    "EMAReferenceConfig",
    "EnvConfig",
    "EvalConfig",
    "GaussianActorConfig",
    "GroupConfig",
    "HeldControllerConfig",
    "InstructionsConfig",
    "KLConfig",
    "KLPENConfig",
    "LanguageEnvConfig",
    "LearnerConfig",
    "LegacyKLConfig",
    "LoggerConfig",
    "LoraConfig",
    "LossConfig",
    "OptimConfig",
    "PeriodicReferenceConfig",
    "RayCollectorConfig",
    "ReferenceConfig",
    "RetrieveKLConfig",
    "RootConfig",
    "SamplerConfig",
    "ScheduleControllerConfig",
    "SortDigitsConfig",
    "TargetControllerConfig",
    "TextConfig",
    "WandbConfig",
]
