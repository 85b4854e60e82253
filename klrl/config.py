"""The schema of every setting; checks that one dataclass alone cannot make are in ``checks.py``.

Values live in ``conf/`` (one YAML per choice); types and ranges live here. This module imports
neither torch nor gymnasium, so that help and config errors answer at once.

To add a setting: a field here, a commented line in the YAML of each choice that has it.
To add a choice with settings of its own: a dataclass here, registered in :data:`SCHEMAS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


def number(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    whole: bool = False,
    optional: bool = True,
) -> Any:
    """Declare a numeric setting with its range.

    ``whole`` accepts 1e6 as well as 1000000 and so needs a field of type Any, which says for itself
    whether null is a value (``optional``); typed fields leave that to OmegaConf.
    """
    rule = {"ge": ge, "gt": gt, "le": le, "whole": whole, "optional": optional}
    return field(default=MISSING, metadata=rule)


def choice(*allowed: str) -> Any:
    """Declare a setting with a closed list of values."""
    return field(default=MISSING, metadata={"allowed": allowed, "optional": False})


# ---------------------------------------------------------------------------------------- groups


@dataclass
class EnvConfig:
    """A Gymnasium environment and its copies in this process."""

    id: str = MISSING
    kwargs: dict[str, Any] = MISSING
    num_envs: int = number(ge=1)
    normalize_observation: bool = MISSING
    reward_scale: float = number(gt=0)


@dataclass
class LanguageEnvConfig:
    """Prompts and a reward function; a response is an episode of one step."""

    task: str = MISSING
    reward: str = MISSING
    reward_timeout: Optional[float] = number(gt=0)  # noqa: UP045 (OmegaConf reads this annotation)


@dataclass
class SortDigitsConfig(LanguageEnvConfig):
    """A verifiable task made here: the user gives digits, the assistant sorts them."""

    shortest: int = number(ge=1)
    longest: int = number(ge=1)
    shots: int = number(ge=0)


@dataclass
class TextConfig(LanguageEnvConfig):
    """Prompts from JSON lines and a reward function of the user's."""

    data: str = MISSING
    eval_data: Optional[str] = None  # noqa: UP045


@dataclass
class ActorConfig:
    """An MLP policy and its critic; the distribution follows the action space."""

    distribution: str = MISSING
    hidden: list[int] = MISSING
    activation: str = choice("tanh", "relu", "elu", "silu", "gelu")
    share_trunk: bool = MISSING
    init: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)


@dataclass
class GaussianActorConfig(ActorConfig):
    """The same with a standard deviation to start from (Box actions)."""

    init_std: float = number(gt=0)


@dataclass
class LoraConfig:
    """Low-rank adapters in place of the weights; r = 0 trains the weights."""

    r: int = number(ge=0)
    alpha: float = number(gt=0)
    dropout: float = number(ge=0, le=1)
    # Any: a list of names, or all-linear.
    target_modules: Any = MISSING


@dataclass
class CausalLMConfig:
    """A causal language model of ``transformers``."""

    distribution: str = MISSING
    model: Optional[str] = None  # noqa: UP045
    dtype: str = choice("float32", "bfloat16", "float64")
    gradient_checkpointing: bool = MISSING
    lora: LoraConfig = field(default_factory=LoraConfig)
    init: Optional[str] = None  # noqa: UP045


@dataclass
class ReferenceConfig:
    """The policy at the start of training."""

    kind: str = MISSING


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
class KLConfig:
    """No KL to a reference: nothing measured, nothing charged."""

    mode: str = MISSING


@dataclass
class LegacyKLConfig(KLConfig):
    """One transform with the sampled log-ratio (k1) in the reward."""

    coef: float = number(ge=0)
    apply: str = choice("rollout", "step")


@dataclass
class RetrieveKLConfig(LegacyKLConfig):
    """Log-prob retrieval twice, then the KL computation."""

    estimator: str = choice("k1", "k2", "k3", "exact")
    placement: str = choice("reward", "loss", "split")
    allow_biased: bool = MISSING


@dataclass
class ControllerConfig:
    """A fixed kl.coef."""

    kind: str = MISSING


@dataclass
class ScheduleControllerConfig(ControllerConfig):
    """kl.coef moves with the frames."""

    shape: str = choice("linear", "cosine")
    end: float = number(ge=0)
    frames: Any = number(gt=0, whole=True)


@dataclass
class AdaptiveControllerConfig(ControllerConfig):
    """kl.coef is multiplied towards a target KL."""

    target: float = number(gt=0)
    horizon: Optional[float] = number(gt=0)  # noqa: UP045
    coef_min: float = number(gt=0)
    coef_max: float = number(gt=0)


@dataclass
class DualControllerConfig(ControllerConfig):
    """log kl.coef ascends on the constraint KL <= target."""

    target: float = number(gt=0)
    lr: float = number(gt=0)
    coef_min: float = number(gt=0)
    coef_max: float = number(gt=0)


@dataclass
class AdvantageConfig:
    """Generalised advantage estimation."""

    gamma: float = number(ge=0, le=1)
    lmbda: float = number(ge=0, le=1)


@dataclass
class GroupConfig:
    """The scores of the other responses to the prompt as the baseline."""

    baseline: str = choice("normalized", "leave_one_out")


@dataclass
class LossConfig:
    """What both policy losses share."""

    name: str = MISSING
    entropy_bonus: bool = MISSING
    entropy_coeff: float = number(ge=0)
    samples_mc_entropy: int = number(ge=1)
    critic_coeff: float = number(ge=0)
    loss_critic_type: str = choice("l1", "l2", "smooth_l1")
    clip_value: Optional[float] = number(gt=0)  # noqa: UP045 (OmegaConf reads this annotation)
    normalize_advantage: bool = MISSING
    separate_losses: bool = MISSING
    reduction: str = choice("mean", "sum", "token", "sequence")


@dataclass
class KLPENConfig(LossConfig):
    """PPO with a KL(old||new) penalty whose coefficient beta follows a rule."""

    dtarg: float = number(gt=0)
    beta: float = number(ge=0)
    increment: float = number(ge=1)
    decrement: float = number(gt=0, le=1)
    beta_rule: str = choice("doubling", "proportional", "forward")
    gain: float = number(gt=0)
    line_search: str = choice("none", "back", "both")
    beta_min: float = number(gt=0)
    beta_max: float = number(gt=0)
    kl_old: str = choice("exact", "sampled")
    samples_mc_kl: int = number(ge=1)


@dataclass
class ClipConfig(LossConfig):
    """PPO with a clipped ratio."""

    clip_epsilon: float = number(gt=0)
    target_kl: Optional[float] = number(gt=0)  # noqa: UP045


@dataclass
class LearnerConfig:
    """Epochs over one rollout, each cut into minibatches."""

    epochs: int = number(ge=1)
    minibatches: int = number(ge=1)
    # Any: YAML reads a bare false as a boolean.
    compile: Any = choice("auto", "false", "jit", "aot")


@dataclass
class OptimConfig:
    """Adam."""

    name: str = MISSING
    lr: float = number(gt=0)
    lr_floor: float = number(ge=0)
    eps: float = number(gt=0)
    max_grad_norm: float = number(gt=0)


@dataclass
class AdamWConfig(OptimConfig):
    """Adam with decoupled weight decay."""

    weight_decay: float = number(ge=0)


@dataclass
class CollectorConfig:
    """Rollouts in this process."""

    name: str = MISSING
    steps: int = number(ge=1)


@dataclass
class RayCollectorConfig(CollectorConfig):
    """Rollouts in other processes, on this machine or on those of a Ray cluster."""

    workers: int = number(ge=1)
    cpus_per_worker: int = number(ge=1)


@dataclass
class SamplerConfig:
    """Responses to prompts, sampled in this process."""

    name: str = MISSING
    prompts: int = number(ge=1)
    group_size: int = number(ge=1)
    max_new_tokens: int = number(ge=1)
    temperature: float = number(gt=0)
    sampler: str = choice("cache", "wrapper")
    scoring: str = choice("auto", "padded")
    samples_every: int = number(ge=0)
    samples_count: int = number(ge=1)


@dataclass
class LoggerConfig:
    """``metrics.jsonl`` alone."""

    name: str = MISSING


@dataclass
class WandbConfig(LoggerConfig):
    """``metrics.jsonl`` and a wandb run."""

    mode: str = choice("auto", "offline", "online")
    project: str = MISSING
    entity: Optional[str] = None  # noqa: UP045
    tags: list[str] = MISSING


@dataclass
class EvalConfig:
    """Deterministic episodes in fresh environments while training goes on."""

    every: int = number(ge=0)
    episodes: int = number(ge=1)


@dataclass
class CheckpointConfig:
    """How often the run can be resumed from."""

    every: int = number(ge=1)


@dataclass
class RootConfig:
    """The settings outside any group."""

    frames: Any = number(gt=0, whole=True, optional=False)
    seed: int = number(ge=0)
    device: str = MISSING
    threads: int = number(ge=1)
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


@dataclass
class JobConfig(ABC):
    """What a control job and a language job share, checked and typed."""

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

    #: What ``frames`` counts, the x-axis of the record; and what a mean KL is a mean over.
    axis: ClassVar[str]
    unit: ClassVar[str]

    @property
    @abstractmethod
    def frames_per_iteration(self) -> int:
        """Frames (language: samples) in one rollout."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is learned, in a word."""

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
    """One control job; what the runner reads."""

    env: EnvConfig
    actor: ActorConfig
    advantage: AdvantageConfig
    collector: CollectorConfig

    axis, unit = "frames", "frame"

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
    """One language job; its frames are samples, that is responses."""

    env: LanguageEnvConfig
    actor: CausalLMConfig
    advantage: AdvantageConfig | GroupConfig
    collector: SamplerConfig

    axis, unit = "samples", "token"

    @property
    def frames_per_iteration(self) -> int:
        """Responses in one rollout: prompts x group_size."""
        return self.collector.prompts * self.collector.group_size

    @property
    def title(self) -> str:
        """Task and reward."""
        return f"{self.env.task}, reward {self.env.reward}"


GROUPS = (
    "env",
    "actor",
    "reference",
    "kl",
    "controller",
    "advantage",
    "loss",
    "learner",
    "optim",
    "collector",
    "logger",
)

#: group -> schema name -> dataclass. A YAML names its schema in its defaults list.
SCHEMAS: dict[str, dict[str, type]] = {
    "env": {"gym": EnvConfig, "sort_digits": SortDigitsConfig, "text": TextConfig},
    "actor": {
        "mlp": ActorConfig,
        "gaussian": GaussianActorConfig,
        "causal_lm": CausalLMConfig,
    },
    "reference": {
        "initial": ReferenceConfig,
        "checkpoint": CheckpointReferenceConfig,
        "ema": EMAReferenceConfig,
        "periodic": PeriodicReferenceConfig,
    },
    "kl": {"none": KLConfig, "legacy": LegacyKLConfig, "retrieve": RetrieveKLConfig},
    "controller": {
        "fixed": ControllerConfig,
        "schedule": ScheduleControllerConfig,
        "adaptive": AdaptiveControllerConfig,
        "dual": DualControllerConfig,
    },
    "advantage": {"gae": AdvantageConfig, "group": GroupConfig},
    "loss": {"klpen": KLPENConfig, "clip": ClipConfig},
    "learner": {"ppo": LearnerConfig},
    "optim": {"adam": OptimConfig, "adamw": AdamWConfig},
    "collector": {"local": CollectorConfig, "ray": RayCollectorConfig, "sampler": SamplerConfig},
    "logger": {"wandb": WandbConfig, "none": LoggerConfig},
}

#: The setting that repeats a choice's name; it is set by choosing, never by hand.
DISCRIMINATORS = {
    "env": "task",
    "actor": "distribution",
    "reference": "kind",
    "kl": "mode",
    "controller": "kind",
    "loss": "name",
    "optim": "name",
    "collector": "name",
    "logger": "name",
}


def register_schemas() -> None:
    """Make the dataclasses known to Hydra, in a group of their own so that they are no choices."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    for group, schemas in SCHEMAS.items():
        for name, node in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=node)


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else beside it in a checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"
