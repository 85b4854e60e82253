"""Declares settings of control jobs: the environment, the network, the rollout."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from omegaconf import MISSING
from pydantic import Field

from klrl.config.choices import registered
from klrl.config.fields import (
    ChoiceConfig,
    Copies,
    Count,
    Natural,
    Number,
    OwnPart,
    Part,
    Place,
    Positive,
    Values,
    Wrapper,
    setting,
)

#: Widths of layers. Between two layers of the largest width are 4e9 weights.
Widths = Annotated[list[Annotated[Count, Field(le=65_536)]], Field(min_length=1)]
Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]


@registered("env", "gym", control="control.env.copies:gym")
class EnvConfig(ChoiceConfig):
    """Any Gymnasium id, with untuned settings: env=gym env.id=MountainCarContinuous-v0."""

    id: str = MISSING  # a Gymnasium id, or module:id for an environment that a module registers
    kwargs: Values = setting({})  # arguments of gymnasium.make, as in env.kwargs.g=9.81
    num_envs: Copies = 8  # copies of the environment, all in this process
    #: CPU threads of MuJoCo's batch, at most env.num_envs; null = threads
    threads: Count | None = setting(None, added=True, free=True)
    normalize_observation: bool = True  # true: the policy normalises its observations
    reward_scale: Positive = 1.0  # the learner gets (reward minus penalty) times this
    #: true: for the learner only, divide the reward by the running std of the discounted rewards
    normalize_reward: bool = setting(False, added=True)
    #: seconds; the run fails if one step of all copies takes longer than this; null = no limit
    step_timeout: Positive | None = setting(None, added=True)
    #: Gymnasium wrappers of each copy, innermost first: [Name, {target: module:Name, args: {x: 1}}]
    wrappers: list[Wrapper] = setting([], added=True, own=True)
    #: the keys of a Dict observation to use, as in [image, direction]
    observation_keys: list[str] | None = setting(None, added=True)
    #: the mask of allowed actions: auto (action_mask in the observation), info (in info) or none
    action_mask: Literal["auto", "info", "none"] = setting("auto", added=True)
    #: the dimension of an image that has its channels: first, last or auto (the run prints it)
    channels: Literal["auto", "first", "last"] = setting("auto", added=True)
    # Set by klrl: the module in ``id`` -> its source.
    sources: dict[str, str] = setting({}, added=True)

    #: The setting that holds the environment's arguments.
    arguments: ClassVar[str] = "env.kwargs"

    @property
    def named(self) -> str:
        """``env.id`` with its value, for errors."""
        return f"env.id={self.id}"


@registered("env", "custom", control="control.env.copies:gym")
class CustomEnvConfig(OwnPart, EnvConfig):
    """A custom environment: env.target=package.module:Name, which returns a Gymnasium env."""

    id: str = ""  # unused here: env.target names the environment
    kwargs: Values = setting({})  # unused here: env.args holds the arguments

    arguments: ClassVar[str] = "env.args"

    @property
    def named(self) -> str:
        """``env.target`` with its value, for errors."""
        return f"env.target={self.target}"


@registered("actor", "categorical", control="control.policy.actor:categorical_agent")
class ActorConfig(ChoiceConfig):
    """A categorical distribution over discrete actions."""

    hidden: Widths = setting([64, 64])  # widths of the hidden layers, policy and critic alike
    activation: Activation = "tanh"  # tanh, relu, elu, silu, gelu
    share_trunk: bool = False  # true: policy and critic share their hidden layers
    #: the policy to start from: a run folder (its weights, critic and normaliser), or
    #: FILE.py:function of a policy of yours (docs/your_policy.md)
    init: Place | None = None
    init_which: Literal["last", "best"] = setting("last", added=True)  # the checkpoint of that run

    #: The setting that chooses the distribution.
    distribution_setting: ClassVar[str] = "actor"
    #: The value of that setting with which the action space determines the distribution.
    fitting: ClassVar[str] = "mlp"
    #: The settings that determine the networks, and the scaling of pixels.
    shapes: ClassVar[tuple[str, ...]] = ("hidden", "activation", "share_trunk", "arch", "scale")

    @property
    def chosen(self) -> str:
        """The value of the setting that chooses the distribution."""
        return self.name


@registered(
    "actor",
    "tanh_normal",
    "a Gaussian through tanh",
    control="control.policy.actor:tanh_normal_agent",
)
@registered("actor", "normal", "a diagonal Gaussian", control="control.policy.actor:normal_agent")
@registered("actor", "mlp", control="control.policy.actor:fitting_agent")
class GaussianActorConfig(ActorConfig):
    """An MLP; its distribution follows the action space: normal for Box, else categorical."""

    #: standard deviation at the start; with tanh_normal, of the action before tanh
    init_std: Positive = 1.0


@registered("actor", "custom", control="control.policy.own:custom_agent")
class CustomActorConfig(OwnPart, GaussianActorConfig):
    """Your networks, with a distribution of klrl: actor.target=package.module:Name."""

    #: auto is normal for Box actions, categorical for discrete ones
    distribution: Literal["auto", "normal", "tanh_normal", "categorical"] = "auto"
    #: own_critic.target=package.module:Name; null: klrl's MLP
    own_critic: Part = setting(None, added=True, own=True)
    hidden: Widths = setting([64, 64])  # widths of klrl's critic
    share_trunk: bool = False  # custom networks share nothing

    distribution_setting: ClassVar[str] = "actor.distribution"
    fitting: ClassVar[str] = "auto"

    @property
    def chosen(self) -> str:
        """The value of the setting that chooses the distribution."""
        return self.distribution


@registered("actor", "cnn", control="control.policy.actor:fitting_agent")
class CNNActorConfig(GaussianActorConfig):
    """A CNN for images, MLPs for the rest; normal for Box, categorical for discrete actions."""

    #: nature: Mnih et al. 2015, images of at least 36 x 36; impala: Espeholt et al. 2018, any size
    arch: Literal["nature", "impala"] = "nature"
    #: divides pixels; null: the upper bound of the image's space
    scale: Positive | None = None
    #: widths of the layers after the CNN; of several observation keys each is encoded to hidden[0]
    hidden: Widths = setting([512])
    activation: Activation = "relu"  # activation of the hidden layers
    #: true: policy and critic share the CNN and the hidden layers, at half the cost
    share_trunk: bool = True


@registered(
    "collector", "torchrl", "TorchRL's Collector", control="control.run.rollout:TorchRLRollout"
)
@registered("collector", "vector", control="control.run.rollout:VectorRollout")
class CollectorConfig(ChoiceConfig):
    """klrl's own loop over the batched environment; its batches are in TorchRL's format."""

    steps: Count = 128  # steps of each copy per rollout
    #: learn from the rollouts that the policy of this many updates ago sampled
    staleness: Natural = setting(0, added=True)

    #: Whether the batches contain recorded actions of another policy.
    imitates: ClassVar[bool] = False
    patience: ClassVar[int | None] = None  # a setting only if ``imitates``


@registered("collector", "demonstrations", control="control.run.demonstrations:Demonstrations")
class DemonstrationsConfig(CollectorConfig):
    """Frames of another policy, from a folder in TorchRL's format; part of experiment=clone."""

    #: a folder that klrl record, TensorDict.memmap or ReplayBuffer.dumps wrote
    data: Place = MISSING
    steps: Count = 32  # a rollout has env.num_envs pieces of this many frames
    #: share of episodes held out from training; their likelihood determines the best checkpoint
    held_out: Annotated[Number, Field(ge=0, le=0.9)] = 0.1
    #: the run ends after this many rollouts without a better held-out likelihood; null = never
    patience: Count | None = 50  # type: ignore[misc]

    imitates = True
