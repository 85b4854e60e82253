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

    #: environment steps to train for, all copies counted; the last rollout is whole
    frames: Any = number(gt=0, whole=True, optional=False)
    #: seeds parameters, actions, minibatches, environments, and the global generators of Python
    #: and numpy
    seed: int = number(ge=0)
    #: auto (cuda where there is one), cpu, cuda, or one of several: cuda:1; CUDA was not run on
    #: hardware yet
    device: str = MISSING
    threads: int = number(ge=1, le=4096)  # CPU threads of torch; small networks are fastest with 1
    resume: Optional[str] = None  # a run folder to go on with, as in resume=outputs/NAME
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
