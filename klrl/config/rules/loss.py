"""``loss``, ``learner`` and ``optim`` against other settings."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import CONTROL, LANGUAGE, Config, JobConfig, KLPENConfig, LanguageConfig

#: domain -> the values of ``loss.reduction``, and the remedy for others
REDUCTIONS = {
    CONTROL: (
        ("mean", "sum"),
        "language only, as are loss=grpo, dr_grpo, dapo and rloo; choose mean or sum over the "
        "frames",
    ),
    LANGUAGE: (
        ("token", "response", "sequence"),
        "control only; choose token (mean over tokens), response (mean over each response's) or "
        "sequence (sum over a response, mean over responses)",
    ),
}


def check_reduction(c: JobConfig) -> None:
    """A domain's loss is reduced over what it has: frames, or tokens and responses."""
    allowed, remedy = REDUCTIONS[c.domain]
    if c.loss.reduction not in allowed:
        raise ConfigError(f"loss.reduction={c.loss.reduction}: {remedy}")


def check_mask_truncated(c: Config) -> None:
    """Frames are all real."""
    if c.loss.mask_truncated:
        raise ConfigError(
            "loss.mask_truncated=true: language only, as is loss=dapo; set it to false"
        )


def check_beta(c: JobConfig) -> None:
    """Beta starts inside its bounds; the forward rule has none."""
    loss = c.loss
    if not isinstance(loss, KLPENConfig):
        return
    if loss.beta_rule == "custom" and loss.own_beta_rule is None:
        raise ConfigError(
            "loss.beta_rule=custom: which one? add loss.own_beta_rule.target=package.module:Name"
        )
    if loss.beta_min > loss.beta_max:
        raise ConfigError(
            f"loss.beta_min={loss.beta_min:g}: above loss.beta_max={loss.beta_max:g}; swap them"
        )
    if loss.beta_rule != "forward" and not loss.beta_min <= loss.beta <= loss.beta_max:
        raise ConfigError(
            f"loss.beta={loss.beta:g}: outside loss.beta_min={loss.beta_min:g} .. "
            f"loss.beta_max={loss.beta_max:g}; start inside the bounds"
        )


def check_lr(c: JobConfig) -> None:
    """The learning rate falls."""
    if c.optim.lr_floor > c.optim.lr:
        raise ConfigError(
            f"optim.lr_floor={c.optim.lr_floor:g}: above optim.lr={c.optim.lr:g}; "
            "the learning rate falls from lr to lr_floor"
        )


def check_minibatches_of_frames(c: Config) -> None:
    """Minibatches share the frames equally, and an advantage that is normalised has a spread."""
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


def check_minibatches_of_prompts(c: LanguageConfig) -> None:
    """Minibatches share the prompts equally."""
    if c.collector.prompts % c.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: does not divide collector.prompts="
            f"{c.collector.prompts}, whose groups stay together; choose a divisor"
        )


def check_compile(c: LanguageConfig) -> None:
    """No language update is compiled."""
    if c.learner.compile not in ("auto", "false"):
        raise ConfigError(
            f"learner.compile={c.learner.compile}: a language model's update runs eagerly; use "
            "learner.compile=false"
        )


def check_learner_of_frames(c: Config) -> None:
    """Settings of the update of a language model."""
    for name in ("dtype", "micro_batch"):
        if (value := getattr(c.learner, name)) is not None:
            raise ConfigError(f"learner.{name}={value}: language only; drop it")


def check_learner_dtype(c: LanguageConfig) -> None:
    """What learns is held in float32 at least, and computed with as the actor asks."""
    dtype, actor = c.learner.dtype, c.actor
    if dtype is not None and actor.dtype == "float64":
        raise ConfigError(
            f"learner.dtype={dtype}: actor.dtype=float64 learns in float64; drop one of the two"
        )
    if dtype == "mixed" and actor.lora.r:
        raise ConfigError(
            f"learner.dtype=mixed: with actor.lora.r={actor.lora.r} the adapters learn in float32 "
            "anyway; drop it, and set actor.dtype=bfloat16 for the weights under them"
        )
    if dtype == "float32" and actor.dtype == "bfloat16" and not actor.lora.r:
        raise ConfigError(
            "learner.dtype=float32: actor.dtype=bfloat16 without adapters computes in bfloat16; "
            "use learner.dtype=mixed, or actor.dtype=float32"
        )


def check_micro_batch(c: LanguageConfig) -> None:
    """A micro-batch is a part of a minibatch."""
    size, prompts = c.learner.micro_batch, c.collector.prompts // c.learner.minibatches
    if size is not None and size > prompts:
        raise ConfigError(
            f"learner.micro_batch={size}: a minibatch has {prompts} prompts (collector.prompts="
            f"{c.collector.prompts} / learner.minibatches={c.learner.minibatches}); choose fewer"
        )
