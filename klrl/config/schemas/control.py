"""Control: the environment, the network, the rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part, setting

ACTIVATIONS = ("tanh", "relu", "elu", "silu", "gelu")


@registered("env", "gym", control="control.env:gym")
@dataclass
class EnvConfig(ChoiceConfig):
    """Any Gymnasium id, as in env=gym env.id=MountainCarContinuous-v0 (untuned)."""

    id: str = MISSING  # a Gymnasium id, or module:id for an environment that a module registers
    kwargs: dict[str, Any] = setting({})  # arguments of gymnasium.make, as in env.kwargs.g=9.81
    num_envs: int = number(8, ge=1)  # copies in this process
    #: running mean and variance inside the policy, frozen during an iteration
    normalize_observation: bool = setting(True)
    #: factor on the shaped reward, for the learner only; never on what is recorded
    reward_scale: float = number(1.0, gt=0)
    #: true: for the learner only, divide by the running std of the discounted rewards
    normalize_reward: bool = added(field(), False)
    #: seconds that a step of all copies may take, then the run ends; null = no limit
    step_timeout: Optional[float] = added(number(gt=0), None)
    #: Gymnasium's or your own around each copy, innermost first: [GrayscaleObservation,
    #: {target: ResizeObservation, args: {shape: [84, 84]}}, package.module:Name]
    wrappers: list[Any] = field(
        default_factory=list, metadata={"added": [], "own": True, "home": "gymnasium.wrappers"}
    )
    #: of a Dict observation, as in [image, direction]; null = all
    observation_keys: Optional[list[str]] = added(field(), None)
    #: which actions can be taken: auto (the observation's key action_mask, where there is one),
    #: info (info's) or none
    action_mask: str = added(choice("auto", "info", "none"), "auto")
    # klrl's to set: module behind ``id`` -> its source.
    sources: dict[str, str] = field(default_factory=dict, metadata={"added": {}})

    #: The setting of its arguments.
    arguments: ClassVar[str] = "env.kwargs"

    @property
    def named(self) -> str:
        """The setting that says which it is, with its value, for errors."""
        return f"env.id={self.id}"


@registered("env", "custom", control="control.env:custom")
@dataclass
class CustomEnvConfig(OwnPart, EnvConfig):
    """An environment of your own: env.target=package.module:Name, which returns a Gymnasium env."""

    id: str = ""  # of env=gym: here env.target says which
    kwargs: dict[str, Any] = field(default_factory=dict)  # of env=gym: here env.args

    arguments: ClassVar[str] = "env.args"

    @property
    def named(self) -> str:
        """As of any environment."""
        return f"env.target={self.target}"


@registered("actor", "categorical", control="control.actor:categorical_agent")
@dataclass
class ActorConfig(ChoiceConfig):
    """A categorical over discrete actions."""

    hidden: list[int] = setting([64, 64])  # widths of the hidden layers, policy and critic alike
    #: tanh, relu, elu, silu or gelu
    activation: str = choice(*ACTIVATIONS)
    share_trunk: bool = setting(False)  # true: policy and critic share their hidden layers
    init: Optional[str] = None  # a run folder to start from: its weights, critic and normaliser

    #: The setting that chooses the distribution, and its choice that follows the action space.
    distribution_setting: ClassVar[str] = "actor"
    fitting: ClassVar[str] = "mlp"

    @property
    def chosen(self) -> str:
        """What that setting says."""
        return self.name


@registered(
    "actor",
    "tanh_normal",
    "a Gaussian squashed by tanh and scaled to the action bounds",
    control="control.actor:tanh_normal_agent",
)
@registered(
    "actor",
    "normal",
    "a diagonal Gaussian; the environment clips actions to its bounds",
    control="control.actor:normal_agent",
)
@registered(
    "actor",
    "mlp",
    "an MLP whose distribution follows the action space: normal for Box, categorical for Discrete",
    control="control.actor:fitting_agent",
)
@dataclass
class GaussianActorConfig(ActorConfig):
    """A Gaussian MLP policy."""

    #: standard deviation at the start, in units of the action (tanh_normal: before tanh), one for
    #: all states
    init_std: float = number(1.0, gt=0)


@registered("actor", "custom", control="control.own:custom_agent")
@dataclass
class CustomActorConfig(OwnPart, GaussianActorConfig):
    """Networks of your own below klrl's distribution: actor.target=package.module:Name."""

    #: auto: normal for Box actions, categorical for others; normal, tanh_normal or categorical
    distribution: str = choice("auto", "normal", "tanh_normal", "categorical")
    #: own_critic.target=package.module:Name, own_critic.args.x=1; null: klrl's MLP
    own_critic: Any = own_part()
    hidden: list[int] = setting([64, 64])  # widths of klrl's critic
    share_trunk: bool = setting(False)  # custom networks share nothing

    distribution_setting: ClassVar[str] = "actor.distribution"
    fitting: ClassVar[str] = "auto"

    @property
    def chosen(self) -> str:
        """What that setting says."""
        return self.distribution


@registered("actor", "cnn", control="control.actor:fitting_agent")
@dataclass
class CNNActorConfig(GaussianActorConfig):
    """A CNN for images, MLPs for the rest; normal for Box, categorical for discrete actions."""

    #: nature (Mnih et al. 2015, images from 36 x 36 on) or impala (a small one of Espeholt et al.
    #: 2018, any size)
    arch: str = choice("nature", "impala")
    scale: float = number(255.0, gt=0)  # what pixels are divided by; their largest value
    #: widths of the layers behind it, policy and critic alike; with several keys the first is each
    #: encoder's too
    hidden: list[int] = setting([512])
    activation: str = choice(*ACTIVATIONS, value="relu")  # of the hidden layers
    #: true: policy and critic share CNN and hidden layers, at half the cost
    share_trunk: bool = setting(True)


@registered(
    "collector",
    "torchrl",
    "TorchRL's Collector, in this process",
    control="control.rollout:torchrl_rollout",
)
@registered(
    "collector",
    "vector",
    "a native loop over the batched environment, in this process; the batch is TorchRL's",
    control="control.rollout:vector_rollout",
)
@dataclass
class CollectorConfig(ChoiceConfig):
    """Rollouts in this process."""

    steps: int = number(128, ge=1)  # steps of each copy per rollout

    #: Whether the copies of the environment are made in other processes.
    elsewhere: ClassVar[bool] = False


@registered(
    "collector",
    "ray",
    control="control.ray_rollout:ray_rollout",
    free=("cpus_timeout",),
    package="ray",
    remedy="pip install 'klrl[ray]', or choose collector=vector",
)
@dataclass
class RayCollectorConfig(CollectorConfig):
    """Rollouts from several processes or machines; needs klrl[ray] (docs/scaling.md)."""

    workers: int = number(2, ge=1)  # processes; each plays env.num_envs / workers copies
    #: CPU cores that Ray reserves for each, and its torch threads
    cpus_per_worker: int = number(1, ge=1)
    #: seconds with too few CPUs in the cluster, then the run ends with a checkpoint
    cpus_timeout: float = added(number(ge=0), 60.0)

    elsewhere: ClassVar[bool] = True
