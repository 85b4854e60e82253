"""Control: the environment, the network, the rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part


@dataclass
class EnvConfig(ChoiceConfig):
    """A Gymnasium environment and its copies in this process."""

    id: str = MISSING
    kwargs: dict[str, Any] = MISSING
    num_envs: int = number(ge=1)
    normalize_observation: bool = MISSING
    reward_scale: float = number(gt=0)
    normalize_reward: bool = added(field(), False)
    step_timeout: Optional[float] = added(number(gt=0), None)  # noqa: UP045
    # Any: an OwnPart each.
    wrappers: list[Any] = field(
        default_factory=list, metadata={"added": [], "own": True, "home": "gymnasium.wrappers"}
    )
    observation_keys: Optional[list[str]] = added(field(), None)  # noqa: UP045
    action_mask: str = added(choice("auto", "info", "none"), "auto")
    #: klrl's to set: module behind ``id`` -> its source.
    sources: dict[str, str] = field(default_factory=dict, metadata={"added": {}})

    #: The setting of its arguments.
    arguments: ClassVar[str] = "env.kwargs"

    @property
    def named(self) -> str:
        """The setting that says which it is, with its value, for errors."""
        return f"env.id={self.id}"


@dataclass
class CustomEnvConfig(OwnPart, EnvConfig):
    """Copies of a custom environment; ``id`` is its target."""

    id: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    arguments: ClassVar[str] = "env.args"

    @property
    def named(self) -> str:
        """As of any environment."""
        return f"env.target={self.target}"


@dataclass
class ActorConfig(ChoiceConfig):
    """An MLP policy and its critic; the distribution follows the action space."""

    hidden: list[int] = MISSING
    activation: str = choice("tanh", "relu", "elu", "silu", "gelu")
    share_trunk: bool = MISSING
    init: Optional[str] = None  # noqa: UP045

    #: The setting that chooses the distribution, and its choice that follows the action space.
    distribution_setting: ClassVar[str] = "actor"
    fitting: ClassVar[str] = "mlp"

    @property
    def chosen(self) -> str:
        """What that setting says."""
        return self.name


@dataclass
class GaussianActorConfig(ActorConfig):
    """The same with a standard deviation to start from (Box actions)."""

    init_std: float = number(gt=0)


@dataclass
class CustomActorConfig(OwnPart, GaussianActorConfig):
    """A custom policy network; its critic is custom too, or klrl's MLP."""

    distribution: str = choice("auto", "normal", "tanh_normal", "categorical")
    # Any: an OwnPart, or None.
    own_critic: Any = own_part()

    distribution_setting: ClassVar[str] = "actor.distribution"
    fitting: ClassVar[str] = "auto"

    @property
    def chosen(self) -> str:
        """What that setting says."""
        return self.distribution


@dataclass
class CNNActorConfig(GaussianActorConfig):
    """A CNN for images, MLPs for what else is observed."""

    arch: str = choice("nature", "impala")
    scale: float = number(gt=0)


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
    cpus_timeout: float = added(number(ge=0), 60.0)

    elsewhere: ClassVar[bool] = True
