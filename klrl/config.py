"""The schema of every setting, and the checks that one dataclass alone cannot make.

Values live in ``conf/`` (one YAML per choice); types and ranges live here. This module imports
neither torch nor gymnasium, so that help and config errors answer at once.

To add a setting: a field here, a commented line in the YAML of each choice that has it.
To add a choice with settings of its own: a dataclass here, registered in :data:`SCHEMAS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from klrl.errors import ConfigError


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
    return field(default=MISSING, metadata={"allowed": allowed})


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
    reduction: str = choice("mean", "sum")


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
    """TorchRL's collector."""

    name: str = MISSING
    steps: int = number(ge=1)


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
class Config:
    """One job, checked and typed; what the runner reads."""

    frames: int
    seed: int
    device: str
    threads: int
    eval: EvalConfig
    checkpoint: CheckpointConfig
    env: EnvConfig
    actor: ActorConfig
    reference: ReferenceConfig
    kl: KLConfig
    controller: ControllerConfig
    advantage: AdvantageConfig
    loss: LossConfig
    learner: LearnerConfig
    optim: OptimConfig
    collector: CollectorConfig
    logger: LoggerConfig

    @property
    def frames_per_iteration(self) -> int:
        """Frames in one rollout: num_envs x steps."""
        return self.env.num_envs * self.collector.steps

    @property
    def iterations(self) -> int:
        """Rollouts that cover ``frames``, the last one whole."""
        return math.ceil(self.frames / self.frames_per_iteration)


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
    "env": {"gym": EnvConfig},
    "actor": {"mlp": ActorConfig, "gaussian": GaussianActorConfig},
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
    "advantage": {"gae": AdvantageConfig},
    "loss": {"klpen": KLPENConfig, "clip": ClipConfig},
    "learner": {"ppo": LearnerConfig},
    "optim": {"adam": OptimConfig, "adamw": AdamWConfig},
    "collector": {"torchrl": CollectorConfig},
    "logger": {"wandb": WandbConfig, "none": LoggerConfig},
}

#: The setting that repeats a choice's name; it is set by choosing, never by hand.
DISCRIMINATORS = {
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


# ---------------------------------------------------------------------------------------- checks


def to_config(cfg: DictConfig) -> Config:
    """Type and check one composed config.

    Args:
        cfg: what Hydra composed, without its ``hydra`` node.

    Returns:
        The same settings as dataclasses.

    Raises:
        ConfigError: a value is missing, out of range, or does not go with another one.
    """
    parts: dict[str, Any] = {}
    extra = sorted(set(map(str, cfg)) - {f.name for f in fields(RootConfig)} - {"experiment"})
    if extra:
        raise ConfigError(f"{extra[0]}: no such setting; drop it")
    for group in GROUPS:
        parts[group] = _object(group, _group_node(cfg, group))
    for name in ("eval", "checkpoint"):
        parts[name] = _object(name, cfg[name])
    root = {f.name: f for f in fields(RootConfig)}
    for name in ("frames", "seed", "device", "threads"):
        parts[name] = _checked(name, cfg.get(name), root[name].metadata)
    config = Config(**parts)
    _check_together(config)
    return config


def _group_node(cfg: DictConfig, group: str) -> DictConfig:
    node = cfg.get(group)
    if node is None:
        raise ConfigError(f"{group}: nothing is chosen; choose one, as in {group}=...")
    if not OmegaConf.is_config(node) or OmegaConf.get_type(node) is dict:
        names = "|".join(SCHEMAS[group])
        raise ConfigError(
            f"{group}: the chosen YAML has no schema; "
            f"put '/schema/{group}/{names}@{group}' first in its defaults list"
        )
    return node


def _object(path: str, node: DictConfig) -> Any:
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ConfigError(f"{missing[0]}: has no value; give one, as in {missing[0]}=...")
    value: Any = OmegaConf.to_object(node)
    extra = sorted(set(map(str, node)) - {f.name for f in fields(value)})
    if extra:
        raise ConfigError(f"{path}.{extra[0]}: no such setting; drop it")
    for f in fields(value):
        if f.metadata:
            checked = _checked(f"{path}.{f.name}", getattr(value, f.name), f.metadata)
            setattr(value, f.name, checked)
    return value


def _checked(key: str, value: Any, rule: Any) -> Any:
    """Return the value, a whole float as an int; raise ConfigError outside the rule."""
    if not rule or (value is None and rule.get("optional", True)):
        return value
    if "allowed" in rule:
        if value not in rule["allowed"]:
            raise ConfigError(f"{key}={value}: choose one of {', '.join(rule['allowed'])}")
        return value
    bounds = " and ".join(
        f"{sign} {rule[name]:g}"
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="))
        if rule[name] is not None
    )
    if rule["whole"]:
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            raise ConfigError(f"{key}={value}: give a whole number {bounds}")
        value = int(value)
    inside = (
        math.isfinite(value)
        and (rule["ge"] is None or value >= rule["ge"])
        and (rule["gt"] is None or value > rule["gt"])
        and (rule["le"] is None or value <= rule["le"])
    )
    if not inside:
        raise ConfigError(f"{key}={value}: out of range; give a finite number {bounds}")
    return value


def _check_together(c: Config) -> None:
    """Refuse combinations that each setting alone allows."""
    batch = c.frames_per_iteration
    if batch % c.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: does not divide the rollout of "
            f"env.num_envs x collector.steps = {c.env.num_envs} x {c.collector.steps} = {batch} "
            "frames; choose a divisor"
        )
    if batch // c.learner.minibatches < 2 and c.loss.normalize_advantage:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: leaves one frame per minibatch, whose "
            "advantage has no spread; choose fewer or loss.normalize_advantage=false"
        )
    if c.optim.lr_floor > c.optim.lr:
        raise ConfigError(
            f"optim.lr_floor={c.optim.lr_floor:g}: above optim.lr={c.optim.lr:g}; "
            "the learning rate falls from lr to lr_floor"
        )
    if c.actor.init == "":
        raise ConfigError("actor.init: has no value; give a trained run: actor.init=outputs/RUN")
    if not c.actor.hidden or any(width < 1 for width in c.actor.hidden):
        raise ConfigError(f"actor.hidden={c.actor.hidden}: give widths >= 1, as in [64,64]")
    if isinstance(c.loss, KLPENConfig):
        _check_beta(c.loss)
    if isinstance(c.kl, RetrieveKLConfig):
        _check_placement(c.kl)
    if isinstance(c.controller, AdaptiveControllerConfig | DualControllerConfig):
        _check_controller(c)
    check_device_name(c.device)


def _check_placement(kl: RetrieveKLConfig) -> None:
    """The table of docs/kl.md: which estimator has the gradient of the KL where."""
    if kl.placement == "reward" and kl.estimator != "k1" and not kl.allow_biased:
        raise ConfigError(
            f"kl.estimator={kl.estimator}: in the reward only k1 has the gradient of the KL "
            "(docs/kl.md); use kl.estimator=k1, kl.placement=loss or split, or say "
            "kl.allow_biased=true"
        )
    if kl.placement == "split" and kl.estimator != "exact":
        raise ConfigError(
            f"kl.placement=split: takes the exact KL, {kl.estimator} would count a step twice; "
            "add kl.estimator=exact"
        )


def _check_controller(c: Config) -> None:
    """A coefficient that is multiplied must start inside its bounds, above 0."""
    controller, coef = c.controller, getattr(c.kl, "coef", None)
    assert isinstance(controller, AdaptiveControllerConfig | DualControllerConfig)
    if coef is not None and not controller.coef_min <= coef <= controller.coef_max:
        raise ConfigError(
            f"kl.coef={coef:g}: controller={controller.kind} multiplies it, within "
            f"controller.coef_min={controller.coef_min:g} .. "
            f"controller.coef_max={controller.coef_max:g}; start inside"
        )


def _check_beta(loss: KLPENConfig) -> None:
    if loss.beta_min > loss.beta_max:
        raise ConfigError(
            f"loss.beta_min={loss.beta_min:g}: above loss.beta_max={loss.beta_max:g}; swap them"
        )
    if loss.beta_rule != "forward" and not loss.beta_min <= loss.beta <= loss.beta_max:
        raise ConfigError(
            f"loss.beta={loss.beta:g}: outside loss.beta_min={loss.beta_min:g} .. "
            f"loss.beta_max={loss.beta_max:g}; start inside the bounds"
        )


def check_device_name(device: str) -> None:
    """Refuse a device name that torch or klrl would not understand."""
    kind, _, index = device.partition(":")
    known = device in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdigit())
    if not known:
        raise ConfigError(f"device={device}: choose auto, cpu, cuda or cuda:0")


# ------------------------------------------------------------------- settings that nothing reads


@dataclass(frozen=True)
class Unread:
    """A setting that a valid config may hold and yet never read."""

    key: str
    unread: Callable[[Config], bool]
    reason: str


_no_entropy = "loss.entropy_bonus=false never reads it; drop it or set loss.entropy_bonus=true"
UNREAD = (
    Unread(
        "loss.samples_mc_kl",
        lambda c: getattr(c.loss, "kl_old", "sampled") != "sampled",
        "loss.kl_old=exact draws no samples; set loss.kl_old=sampled",
    ),
    Unread(
        "loss.gain",
        lambda c: getattr(c.loss, "beta_rule", "proportional") != "proportional",
        "only loss.beta_rule=proportional reads it; drop it or set that",
    ),
    *(
        Unread(
            f"loss.{name}",
            lambda c: getattr(c.loss, "beta_rule", "") == "proportional",
            "loss.beta_rule=proportional reads loss.gain instead; drop it",
        )
        for name in ("increment", "decrement")
    ),
    Unread(
        "kl.apply",
        lambda c: getattr(c.kl, "placement", "reward") == "loss",
        "kl.placement=loss charges no reward; drop it",
    ),
    Unread("loss.entropy_coeff", lambda c: not c.loss.entropy_bonus, _no_entropy),
    Unread("loss.samples_mc_entropy", lambda c: not c.loss.entropy_bonus, _no_entropy),
    Unread(
        "loss.samples_mc_entropy",
        lambda c: c.actor.distribution != "tanh_normal",
        "only actor=tanh_normal lacks a closed-form entropy; drop it",
    ),
    Unread(
        "loss.separate_losses",
        lambda c: not c.actor.share_trunk,
        "policy and critic share nothing; set actor.share_trunk=true",
    ),
    *(
        Unread(
            f"loss.{name}",
            lambda c: getattr(c.loss, "beta_rule", "") == "forward",
            "loss.beta_rule=forward has no bounds, as in TorchRL; use loss.beta_rule=doubling",
        )
        for name in ("beta_min", "beta_max")
    ),
    Unread("eval.episodes", lambda c: c.eval.every == 0, "eval.every=0 never evaluates; drop it"),
)


def check_all_read(config: Config, overridden: Iterable[str]) -> None:
    """Refuse an override that the chosen composition never reads.

    Args:
        config: the checked job.
        overridden: the keys that the user gave, as in ``loss.beta``.

    Raises:
        ConfigError: with the key and the reason.
    """
    given = set(overridden)
    for group, name in DISCRIMINATORS.items():
        if f"{group}.{name}" in given:
            raise ConfigError(f"{group}.{name}: set by the choice; choose with {group}=...")
    for rule in UNREAD:
        if rule.key in given and rule.unread(config):
            raise ConfigError(f"{rule.key}: nothing reads it here: {rule.reason}")
    if config.kl.mode == "none":
        groups = ("reference", "controller")
        named = sorted(k for k in given if k.split(".")[0] in groups)
        if named:
            raise ConfigError(
                f"{named[0]}: nothing reads it here: kl=none has no {named[0].split('.')[0]}; "
                "drop it"
            )
