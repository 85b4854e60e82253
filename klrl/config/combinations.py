"""Settings against each other: combinations that are refused, settings that a job never reads.

A check takes a typed job and raises a ConfigError that names setting, value and remedy. To add one:
a function, and its name in :data:`CHECKS`; for a setting that nothing reads a rule in
:data:`UNREAD`. No torch in here; ``klrl.runs.machine`` and each domain's ``preflight`` check what
depends on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klrl.base.errors import ConfigError
from klrl.config import (
    CONTROL,
    LANGUAGE,
    Config,
    GroupConfig,
    JobConfig,
    KLPENConfig,
    LanguageConfig,
    LegacyKLConfig,
    RayCollectorConfig,
    RetrieveKLConfig,
    SortDigitsConfig,
    TargetControllerConfig,
    TextConfig,
)
from klrl.config.placement import check_divergence, check_placement
from klrl.config.schemas import SHAPED

MOST_DIGITS = 64
#: Positions of the small base model; a prompt takes 8 + digits tokens, and 20 more per shot.
BASE_CONTEXT = 256

#: domain -> the values of ``loss.reduction``, and the remedy for others
_REDUCTIONS = {
    CONTROL: (("mean", "sum"), "language only; choose mean or sum over the frames"),
    LANGUAGE: (
        ("token", "sequence"),
        "control only; choose token (mean over tokens) or sequence (sum over a response, mean "
        "over responses)",
    ),
}

#: domain -> the values of ``controller.unit``, and the remedy for others
_UNITS = {
    CONTROL: (("step",), "language only; a frame is a step: choose step"),
    LANGUAGE: (
        ("token", "sequence"),
        "control only; choose token (mean over tokens) or sequence (sum over a response, mean "
        "over responses)",
    ),
}


# ----------------------------------------------------------------------------------- both domains


def _check_lr(c: JobConfig) -> None:
    if c.optim.lr_floor > c.optim.lr:
        raise ConfigError(
            f"optim.lr_floor={c.optim.lr_floor:g}: above optim.lr={c.optim.lr:g}; "
            "the learning rate falls from lr to lr_floor"
        )


def _check_init(c: JobConfig) -> None:
    if c.actor.init == "":
        raise ConfigError("actor.init: has no value; give a trained run: actor.init=outputs/RUN")


def _check_reduction(c: JobConfig) -> None:
    allowed, remedy = _REDUCTIONS[c.domain]
    if c.loss.reduction not in allowed:
        raise ConfigError(f"loss.reduction={c.loss.reduction}: {remedy}")


def _check_beta(c: JobConfig) -> None:
    loss = c.loss
    if not isinstance(loss, KLPENConfig):
        return
    if loss.beta_min > loss.beta_max:
        raise ConfigError(
            f"loss.beta_min={loss.beta_min:g}: above loss.beta_max={loss.beta_max:g}; swap them"
        )
    if loss.beta_rule != "forward" and not loss.beta_min <= loss.beta <= loss.beta_max:
        raise ConfigError(
            f"loss.beta={loss.beta:g}: outside loss.beta_min={loss.beta_min:g} .. "
            f"loss.beta_max={loss.beta_max:g}; start inside the bounds"
        )


def _check_kl_placement(c: JobConfig) -> None:
    if isinstance(c.kl, RetrieveKLConfig):
        check_divergence(c.kl.divergence, c.kl.placement, c.kl.estimator)
        check_placement(c.kl.placement, c.kl.estimator, c.kl.allow_biased)


def _check_divergence(c: JobConfig) -> None:
    """A divergence that the environment does not know, and a target that js cannot reach."""
    divergence = getattr(c.kl, "divergence", "reverse")
    if divergence != "reverse" and getattr(c.kl, "apply", "rollout") == "step":
        raise ConfigError(
            f"kl.apply=step: charges the reverse KL alone; with kl.divergence={divergence} use "
            "kl.apply=rollout"
        )
    controller = c.controller
    if divergence != "js" or not isinstance(controller, TargetControllerConfig):
        return
    if controller.unit != "sequence" and controller.target >= math.log(2):
        raise ConfigError(
            f"controller.target={controller.target:g}: kl.divergence=js never reaches ln 2 = 0.693 "
            "nats in one state; choose less"
        )


def _check_reward_weight(c: JobConfig) -> None:
    """Without the reward, the penalty must be there."""
    charged = getattr(c.kl, "coef", 0) > 0 or getattr(c.controller, "end", 0) > 0  # of schedule
    if c.advantage.reward_weight == 0 and (c.kl.name == "none" or not charged):
        what = "kl=none" if c.kl.name == "none" else "kl.coef=0"
        raise ConfigError(
            f"advantage.reward_weight=0: with {what} there is nothing to learn from; "
            "use kl=retrieve kl.coef=1"
        )


def _check_controller(c: JobConfig) -> None:
    """A coefficient that is multiplied must start inside its bounds, above 0."""
    controller, coef = c.controller, getattr(c.kl, "coef", None)
    if coef is None or not isinstance(controller, TargetControllerConfig):
        return
    if not controller.coef_min <= coef <= controller.coef_max:
        raise ConfigError(
            f"kl.coef={coef:g}: controller={controller.name} multiplies it, within "
            f"controller.coef_min={controller.coef_min:g} .. "
            f"controller.coef_max={controller.coef_max:g}; start inside"
        )


def _check_unit(c: JobConfig) -> None:
    unit, (allowed, remedy) = getattr(c.controller, "unit", None), _UNITS[c.domain]
    if unit is not None and unit not in allowed:
        raise ConfigError(f"controller.unit={unit}: {remedy}")


# ---------------------------------------------------------------------------------------- control


def _check_frames(c: Config) -> None:
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


def _check_ray(c: Config) -> None:
    """Refuse copies that workers cannot share equally, and a KL that they cannot compute."""
    if not isinstance(c.collector, RayCollectorConfig):
        return
    if c.env.num_envs % c.collector.workers:
        raise ConfigError(
            f"collector.workers={c.collector.workers}: does not divide env.num_envs="
            f"{c.env.num_envs}, and every worker steps equally many copies; choose a divisor"
        )
    if isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(
            "kl.apply=step: with collector=ray the reference stays with the learner; use "
            "kl.apply=rollout, which gives the same numbers"
        )


#: Two layers of it have 4e9 weights between them.
_WIDEST = 65_536


def _check_hidden(c: Config) -> None:
    if not c.actor.hidden or not all(1 <= width <= _WIDEST for width in c.actor.hidden):
        raise ConfigError(
            f"actor.hidden={c.actor.hidden}: give widths >= 1 (and <= {_WIDEST}), as in [64,64]"
        )


# --------------------------------------------------------------------------------------- language


def _check_task(c: LanguageConfig) -> None:
    env = c.env
    if isinstance(env, TextConfig):
        if env.reward in ("exact", "proxy"):
            raise ConfigError(
                f"env.reward={env.reward}: belongs to env=sort_digits; give your own function as "
                "package.module:function"
            )
        if c.actor.model is None and c.actor.init is None:
            raise ConfigError(
                "actor.model=null: env=text needs a model; give a folder written by "
                "save_pretrained, or a hub id"
            )
    if isinstance(env, SortDigitsConfig) and not env.shortest <= env.longest <= MOST_DIGITS:
        raise ConfigError(
            f"env.longest={env.longest}: give env.shortest={env.shortest} .. {MOST_DIGITS}"
        )
    if isinstance(env, SortDigitsConfig) and c.actor.model is None:
        room = BASE_CONTEXT - 8 - env.longest - 20 * env.shots
        if room < c.collector.max_new_tokens:
            raise ConfigError(
                f"env.shots={env.shots}: with env.longest={env.longest} leaves {max(room, 0)} of "
                f"the base model's {BASE_CONTEXT} tokens for a response of "
                f"collector.max_new_tokens={c.collector.max_new_tokens}; choose fewer"
            )


def _check_baseline(c: LanguageConfig) -> None:
    """The spread divides a KL that stands in the advantage, and that one alone."""
    if not isinstance(c.advantage, GroupConfig) or c.advantage.baseline != SHAPED:
        return
    words = f"advantage.baseline={SHAPED}: divides score and KL by the spread of the group, and"
    if c.kl.name == "none":
        raise ConfigError(f"{words} kl=none has no KL; choose advantage.baseline=normalized")
    placement = getattr(c.kl, "placement", "reward")
    if placement != "reward":
        raise ConfigError(
            f"{words} kl.placement={placement} charges it in the loss, undivided; choose "
            "kl.placement=reward or advantage.baseline=leave_one_out"
        )


def _check_groups(c: LanguageConfig) -> None:
    size, count = c.collector.group_size, c.collector.prompts
    if isinstance(c.advantage, GroupConfig) and size < 2:
        raise ConfigError(
            f"collector.group_size={size}: advantage=group compares the responses to a prompt; "
            "give >= 2, or choose advantage=gae"
        )
    if count % c.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: does not divide collector.prompts="
            f"{count}, whose groups stay together; choose a divisor"
        )


def _check_lora(c: LanguageConfig) -> None:
    lora = c.actor.lora
    if c.reference.name == "adapter_off" and lora.r == 0 and c.kl.name != "none":
        raise ConfigError(
            "reference=adapter_off: actor.lora.r=0 has no adapters to switch off; set "
            "actor.lora.r=8, or choose reference=initial"
        )
    if lora.dropout:
        raise ConfigError(
            f"actor.lora.dropout={lora.dropout:g}: the updated policy would differ from the one "
            "that sampled; set it to 0"
        )
    targets = lora.target_modules
    listed = isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)
    if targets != "all-linear" and not listed:
        raise ConfigError(
            f"actor.lora.target_modules={targets}: give names as in [q_proj,v_proj], or all-linear"
        )


def _check_apply(c: LanguageConfig) -> None:
    if getattr(c.kl, "apply", "rollout") == "step":
        raise ConfigError(
            "kl.apply=step: the KL of a response is known when it is complete; use kl.apply=rollout"
        )


def _check_compile(c: LanguageConfig) -> None:
    if c.learner.compile not in ("auto", "false"):
        raise ConfigError(
            f"learner.compile={c.learner.compile}: a language model's update runs eagerly; use "
            "learner.compile=false"
        )


Check = Callable[[Any], None]
_BOTH: Sequence[Check] = (
    _check_reduction,
    _check_lr,
    _check_init,
    _check_beta,
    _check_kl_placement,
    _check_divergence,
    _check_reward_weight,
    _check_controller,
    _check_unit,
)
#: domain -> its checks; the first that fails is reported
CHECKS: Mapping[str, Sequence[Check]] = {
    CONTROL: (_check_frames, _check_ray, _check_hidden, *_BOTH),
    LANGUAGE: (
        _check_task,
        _check_groups,
        _check_baseline,
        _check_lora,
        _check_apply,
        _check_compile,
        *_BOTH,
    ),
}


# ---------------------------------------------------------------------- settings that nothing reads


@dataclass(frozen=True)
class Unread:
    """A rule on one setting, or on all settings of a group.

    Attributes:
        key: the setting, as ``loss.gain``, or the group.
        unread: whether a job, a ``Config`` or a ``LanguageConfig``, never reads it.
        reason: why, and the remedy.
    """

    key: str
    unread: Callable[[Any], bool]
    reason: str


_no_entropy = "loss.entropy_bonus=false never reads it; drop it or set loss.entropy_bonus=true"
_unbounded = "loss.beta_rule=forward has no bounds, as in TorchRL; use loss.beta_rule=doubling"
_grouped = "advantage=group has no critic; drop it or choose advantage=gae"
_full = "actor.lora.r=0 has no adapters; set actor.lora.r"
_UNREAD_BOTH = (
    Unread(
        "kl.samples_mc_js",
        lambda c: getattr(c.kl, "divergence", "js") != "js",
        "only kl.divergence=js draws samples; drop it or set that",
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
    Unread("loss.entropy_coeff", lambda c: not c.loss.entropy_bonus, _no_entropy),
    *(
        Unread(f"loss.{name}", lambda c: getattr(c.loss, "beta_rule", "") == "forward", _unbounded)
        for name in ("beta_min", "beta_max")
    ),
    *(
        Unread(group, lambda c: c.kl.name == "none", f"kl=none has no {group}; drop it")
        for group in ("reference", "controller")
    ),
    *(
        Unread(
            f"eval.{name}",
            lambda c: not c.eval.on,
            "eval.every=0 never evaluates, nor does eval.evaluations=0; drop it",
        )
        for name in ("episodes", "steps", "final", "sampled")
    ),
    Unread(
        "eval.share",
        lambda c: not c.eval.on,
        "eval.evaluations=0 never evaluates; drop it",
    ),
    *(
        Unread(
            f"eval.{name}",
            lambda c: c.eval.every is not None,
            "eval.every says when to evaluate, whatever it costs; drop one of the two",
        )
        for name in ("evaluations", "share")
    ),
)
_UNREAD_CONTROL = (
    Unread(
        "kl.samples_mc_js",
        lambda c: c.actor.name == "categorical",
        "of a categorical the js is a sum; drop it",
    ),
    Unread(
        "loss.samples_mc_kl",
        lambda c: getattr(c.loss, "kl_old", "sampled") != "sampled",
        "loss.kl_old=exact draws no samples; set loss.kl_old=sampled",
    ),
    Unread(
        "kl.apply",
        lambda c: getattr(c.kl, "placement", "reward") == "loss",
        "kl.placement=loss puts no penalty in the reward; drop it",
    ),
    Unread("loss.samples_mc_entropy", lambda c: not c.loss.entropy_bonus, _no_entropy),
    Unread(
        "loss.samples_mc_entropy",
        lambda c: c.actor.name != "tanh_normal",
        "only actor=tanh_normal lacks a closed-form entropy; drop it",
    ),
    Unread(
        "loss.separate_losses",
        lambda c: not c.actor.share_trunk,
        "policy and critic share nothing; set actor.share_trunk=true",
    ),
)
_UNREAD_LANGUAGE = (
    Unread("eval.steps", lambda c: True, "a response is one step; set eval.episodes"),
    Unread("kl.samples_mc_js", lambda c: True, "of tokens the js is a sum; drop it"),
    *(
        Unread(f"loss.{name}", lambda c: isinstance(c.advantage, GroupConfig), _grouped)
        for name in ("critic_coeff", "loss_critic_type", "clip_value", "separate_losses")
    ),
    *(
        Unread(f"actor.lora.{name}", lambda c: c.actor.lora.r == 0, _full)
        for name in ("alpha", "dropout", "target_modules")
    ),
    *(
        Unread(f"loss.{name}", lambda c: True, reason)
        for name, reason in (
            ("samples_mc_kl", "a language job samples KL(old||new) from the responses; drop it"),
            ("samples_mc_entropy", "a token's entropy has a closed form; drop it"),
        )
    ),
    Unread(
        "collector.samples_count",
        lambda c: c.collector.samples_every == 0,
        "collector.samples_every=0 never shows any; drop it",
    ),
)
#: domain -> the rules of its jobs
UNREAD = {
    CONTROL: (*_UNREAD_BOTH, *_UNREAD_CONTROL),
    LANGUAGE: (*_UNREAD_BOTH, *_UNREAD_LANGUAGE),
}


def check_all_read(config: JobConfig, overridden: Iterable[str]) -> None:
    """Refuse an override that the chosen composition never reads.

    Args:
        config: the checked job.
        overridden: the keys that the user gave, as in ``loss.beta``.

    Raises:
        ConfigError: an override is never read; says why.
    """
    given = sorted(overridden)
    for rule in UNREAD[config.domain]:
        named = [key for key in given if f"{key}.".startswith(f"{rule.key}.")]
        if named and rule.unread(config):
            raise ConfigError(f"{named[0]}: nothing reads it here: {rule.reason}")
