"""The settings of a job, by group, with their types and ranges; values are in ``conf/``.

Where an annotation is ``Optional[...]`` and not ``... | None``, OmegaConf reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part
from klrl.config.placement import DIVERGENCES, ESTIMATORS, OWN, PLACEMENTS

# ----------------------------------------------------------- control: environment, network, rollout


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

    #: The setting of its arguments.
    arguments: ClassVar[str] = "env.kwargs"

    @property
    def named(self) -> str:
        """The setting that says which it is, with its value, for errors."""
        return f"env.id={self.id}"


@dataclass
class CustomEnvConfig(OwnPart, EnvConfig):
    """Copies of an environment of the user's own; ``id`` is its target."""

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
    """A policy network of the user's own, and its critic, own or klrl's MLP."""

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
    """A CNN for images beside MLPs for what else is observed."""

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


# ------------------------------------------------------------------- language: task, model, sampler


@dataclass
class LanguageEnvConfig(ChoiceConfig):
    """Prompts and reward functions; a response is an episode of one step."""

    # Any: a name, or a list of names.
    reward: Any = MISSING
    reward_weights: Optional[list[float]] = added(field(), None)  # noqa: UP045
    reward_timeout: Optional[float] = number(gt=0)  # noqa: UP045

    #: Rewards that come with the task.
    own_rewards: ClassVar[tuple[str, ...]] = ()

    @property
    def rewards(self) -> list[str]:
        """The names of the reward functions."""
        return list(self.reward) if isinstance(self.reward, list) else [self.reward]


@dataclass
class SortDigitsConfig(LanguageEnvConfig):
    """A generated, verifiable task: the user gives digits, the assistant sorts them."""

    shortest: int = number(ge=1)
    longest: int = number(ge=1)
    shots: int = number(ge=0)

    own_rewards: ClassVar[tuple[str, ...]] = ("exact", "proxy")


@dataclass
class InstructionsConfig(LanguageEnvConfig):
    """A generated instruction that a function verifies: describe a thing in one short sentence."""

    own_rewards: ClassVar[tuple[str, ...]] = ("followed", "followed_share")


@dataclass
class TextConfig(LanguageEnvConfig):
    """Prompts from files, and the user's own reward function."""

    data: str = MISSING
    split: str = added(field(), "train")
    eval_data: Optional[str] = None  # noqa: UP045
    eval_split: Optional[str] = added(field(), None)  # noqa: UP045
    eval_share: float = added(number(ge=0), 0.0)
    template_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"added": {}})


@dataclass
class LoraConfig:
    """Low-rank adapters in place of the weights; r = 0 trains the weights."""

    r: int = number(ge=0)
    alpha: float = number(gt=0)
    dropout: float = number(ge=0, le=1)
    # Any: a list of names, or all-linear.
    target_modules: Any = MISSING


@dataclass
class CausalLMConfig(ChoiceConfig):
    """A causal language model of ``transformers``."""

    model: Optional[str] = None  # noqa: UP045
    dtype: str = choice("float32", "bfloat16", "float64")
    gradient_checkpointing: bool = MISSING
    lora: LoraConfig = field(default_factory=LoraConfig)
    init: Optional[str] = None  # noqa: UP045


@dataclass
class SamplerConfig(ChoiceConfig):
    """Responses to prompts, sampled in this process."""

    prompts: int = number(ge=1)
    group_size: int = number(ge=1)
    max_new_tokens: int = number(ge=1)
    temperature: float = number(gt=0)
    sampler: str = choice("cache", "wrapper")
    scoring: str = choice("auto", "padded")
    samples_every: int = number(ge=0)
    samples_count: int = number(ge=1)


# ------------------------------------- both domains: pi_ref, the penalty, the controller of kl.coef


@dataclass
class ReferenceConfig(ChoiceConfig):
    """The policy at the start of training."""


@dataclass
class CheckpointReferenceConfig(ReferenceConfig):
    """A policy that another run trained."""

    path: str = MISSING
    which: str = choice("last", "best")


@dataclass
class EMAReferenceConfig(ReferenceConfig):
    """A moving average of the policy."""

    decay: float = number(ge=0, le=1)


@dataclass
class PeriodicReferenceConfig(ReferenceConfig):
    """The policy as it was some iterations ago."""

    every: int = number(ge=1)


@dataclass
class KLConfig(ChoiceConfig):
    """No KL to a reference: no measurement, no penalty."""


@dataclass
class LegacyKLConfig(KLConfig):
    """One transform with the sampled log-ratio (k1) in the reward."""

    coef: float = number(ge=0)
    apply: str = choice("rollout", "step")


@dataclass
class RetrieveKLConfig(LegacyKLConfig):
    """Log-prob retrieval twice, then the KL computation."""

    estimator: str = choice(*ESTIMATORS, OWN)
    placement: str = choice(*PLACEMENTS)
    allow_biased: bool = MISSING
    divergence: str = added(choice(*DIVERGENCES, OWN), "reverse")
    samples_mc_js: int = added(number(ge=2), 16)
    # Any: an OwnPart, or None.
    own_estimator: Any = own_part()
    own_divergence: Any = own_part()


@dataclass
class ControllerConfig(ChoiceConfig):
    """A fixed kl.coef."""


@dataclass
class ScheduleControllerConfig(ControllerConfig):
    """kl.coef moves with the frames."""

    shape: str = choice("linear", "cosine")
    end: float = number(ge=0)
    frames: Any = number(gt=0, whole=True)


@dataclass
class TargetControllerConfig(ControllerConfig):
    """kl.coef is multiplied towards a target KL, within bounds."""

    target: float = number(gt=0)
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)  # noqa: UP045
    coef_min: float = number(gt=0)
    coef_max: float = number(gt=0)


@dataclass
class AdaptiveControllerConfig(TargetControllerConfig):
    """By at most a fifth per horizon (Ziegler et al. 2019)."""

    horizon: Optional[float] = number(gt=0)  # noqa: UP045


@dataclass
class DualControllerConfig(TargetControllerConfig):
    """log kl.coef ascends on the constraint KL <= target."""

    lr: float = number(gt=0)


@dataclass
class HeldControllerConfig(TargetControllerConfig):
    """Proportional and integral gain on ln(KL / target)."""

    integral: float = number(ge=0)
    proportional: float = number(ge=0)
    limit: float = number(gt=0)


@dataclass
class CustomControllerConfig(OwnPart, ControllerConfig):
    """A controller of the user's own."""


# ----------------------------------------- both domains: advantage, policy loss, learner, optimiser


@dataclass
class AdvantageConfig(ChoiceConfig):
    """Generalised advantage estimation."""

    gamma: float = number(ge=0, le=1)
    lmbda: float = number(ge=0, le=1)
    reward_weight: float = added(number(ge=0), 1.0)


@dataclass
class CustomAdvantageConfig(OwnPart, AdvantageConfig):
    """An estimate of the user's own."""


#: ``advantage.baseline`` that divides score and KL by the spread of the group's scores.
SHAPED = "normalized_shaped"


@dataclass
class GroupConfig(ChoiceConfig):
    """A baseline from the scores of a prompt's group of responses."""

    baseline: str = choice("normalized", SHAPED, "mean", "leave_one_out")
    reward_weight: float = added(number(ge=0), 1.0)


@dataclass
class LossConfig(ChoiceConfig):
    """The settings that all policy losses share."""

    entropy_bonus: bool = MISSING
    entropy_coeff: float = number(ge=0)
    samples_mc_entropy: int = number(ge=1)
    critic_coeff: float = number(ge=0)
    loss_critic_type: str = choice("l1", "l2", "smooth_l1")
    clip_value: Optional[float] = number(gt=0)  # noqa: UP045
    normalize_advantage: bool = MISSING
    separate_losses: bool = MISSING
    reduction: str = choice("mean", "sum", "token", "response", "sequence")
    mask_truncated: bool = added(field(default=MISSING), False)


@dataclass
class KLPENConfig(LossConfig):
    """PPO with a KL(old||new) penalty whose coefficient beta follows a rule."""

    dtarg: float = number(gt=0)
    dtarg_end: Optional[float] = added(number(gt=0), None)  # noqa: UP045
    beta: float = number(ge=0)
    increment: float = number(ge=1)
    decrement: float = number(gt=0, le=1)
    beta_rule: str = choice("doubling", "proportional", "forward", "custom")
    gain: float = number(gt=0)
    line_search: str = choice("none", "back", "both")
    max_alpha: float = added(number(ge=1), 2.0)
    beta_min: float = number(gt=0)
    beta_max: float = number(gt=0)
    kl_old: str = choice("exact", "sampled")
    samples_mc_kl: int = number(ge=1)
    # Any: an OwnPart, or None.
    own_beta_rule: Any = own_part()


@dataclass
class ClipConfig(LossConfig):
    """PPO with a clipped ratio."""

    clip_epsilon: float = number(gt=0)
    clip_epsilon_high: Optional[float] = added(number(gt=0), None)  # noqa: UP045
    target_kl: Optional[float] = number(gt=0)  # noqa: UP045


@dataclass
class CustomLossConfig(OwnPart, LossConfig):
    """A policy loss of the user's own, beside the terms that all losses share."""


@dataclass
class LearnerConfig(ChoiceConfig):
    """Epochs over one rollout, each split into minibatches."""

    epochs: int = number(ge=1)
    minibatches: int = number(ge=1)
    # Any: YAML reads a bare false as a boolean.
    compile: Any = choice("auto", "false", "jit", "aot")
    dtype: Optional[str] = added(choice("float32", "mixed", optional=True), None)  # noqa: UP045
    micro_batch: Optional[int] = added(number(ge=1), None)  # noqa: UP045


@dataclass
class OptimConfig(ChoiceConfig):
    """Adam."""

    lr: float = number(gt=0)
    lr_floor: float = number(ge=0)
    eps: float = number(gt=0)
    max_grad_norm: float = number(gt=0)


@dataclass
class AdamWConfig(OptimConfig):
    """Adam with decoupled weight decay."""

    weight_decay: float = number(ge=0)


# --------------------------------------------------- both domains: logger, evaluations, checkpoints


@dataclass
class LoggerConfig(ChoiceConfig):
    """``metrics.jsonl``, and what needs no settings: ``tensorboard``, ``csv``."""

    also: list[str] = field(default_factory=list, metadata={"added": []})

    def offline(self) -> LoggerConfig:
        """The same logger, sending nothing over the network."""
        return self


@dataclass
class WandbConfig(LoggerConfig):
    """``metrics.jsonl`` and a wandb run."""

    mode: str = choice("auto", "offline", "online")
    project: str = MISSING
    entity: Optional[str] = None  # noqa: UP045
    tags: list[str] = MISSING

    def offline(self) -> WandbConfig:
        """Wandb's records stay in the run folder."""
        return replace(self, mode="offline")


@dataclass
class CustomLoggerConfig(OwnPart, LoggerConfig):
    """``metrics.jsonl`` and a logger of the user's own."""


@dataclass
class EvalConfig:
    """Episodes (language: responses) in separate environments, during training and at its end."""

    every: Optional[int] = number(ge=0)  # noqa: UP045
    episodes: int = number(ge=1)
    evaluations: int = added(number(ge=0), 10)
    steps: int = added(number(ge=1), 10_000)
    share: float = added(number(gt=0), 1.0)
    final: int = added(number(ge=0), 0)
    sampled: bool = added(field(), False)

    @property
    def on(self) -> bool:
        """Whether a run is evaluated at all."""
        return (self.evaluations if self.every is None else self.every) > 0


@dataclass
class CheckpointConfig:
    """How often a checkpoint is written."""

    every: int = number(ge=1)


# -------------------------------------------------------------------------------- outside any group


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
