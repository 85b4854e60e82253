"""What is outside any group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import number
from klrl.config.schemas.record import CheckpointConfig, EvalConfig


@dataclass
class RootConfig:
    """The settings outside any group."""

    frames: Any = number(gt=0, whole=True, optional=False)
    seed: int = number(ge=0)
    device: str = MISSING
    threads: int = number(ge=1, le=4096)
    resume: Optional[str] = None
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
