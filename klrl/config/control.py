"""The settings of control alone: environment, network, rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, choice, number


@dataclass
class EnvConfig(ChoiceConfig):
    """A Gymnasium environment and its copies in this process."""

    id: str = MISSING
    kwargs: dict[str, Any] = MISSING
    num_envs: int = number(ge=1)
    normalize_observation: bool = MISSING
    reward_scale: float = number(gt=0)


@dataclass
class ActorConfig(ChoiceConfig):
    """An MLP policy and its critic; the distribution follows the action space."""

    hidden: list[int] = MISSING
    activation: str = choice("tanh", "relu", "elu", "silu", "gelu")
    share_trunk: bool = MISSING
    init: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)


@dataclass
class GaussianActorConfig(ActorConfig):
    """The same with a standard deviation to start from (Box actions)."""

    init_std: float = number(gt=0)


@dataclass
class CollectorConfig(ChoiceConfig):
    """Rollouts in this process."""

    steps: int = number(ge=1)

    #: Whether the copies of the environment are made in other processes.
    elsewhere: ClassVar[bool] = False


@dataclass
class RayCollectorConfig(CollectorConfig):
    """Rollouts in other processes, on this machine or on those of a Ray cluster."""

    workers: int = number(ge=1)
    cpus_per_worker: int = number(ge=1)

    elsewhere: ClassVar[bool] = True
