"""Rules for jobs of both domains."""

from __future__ import annotations

import math

from klrl.base.errors import ConfigError
from klrl.config import (
    CHOICES,
    CONTROL,
    LANGUAGE,
    ClipConfig,
    JobConfig,
    KLPENConfig,
    LegacyKLConfig,
    LoggerConfig,
    RetrieveKLConfig,
    ScheduleControllerConfig,
    TargetControllerConfig,
    TRPOConfig,
)
from klrl.config.placement import OWN, check_divergence, check_placement

#: domain -> the allowed values of ``loss.reduction``, and the remedy for other values
_REDUCTIONS = {
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
#: domain -> the allowed values of ``controller.unit`` and ``loss.unit``, remedy for other values
_UNITS = {
    CONTROL: (("step",), "language only; a frame is a step: choose step"),
    LANGUAGE: (
        ("token", "sequence"),
        "control only; choose token (mean over tokens) or sequence (sum over a response)",
    ),
}


def check_domain_values(c: JobConfig) -> None:
    """``reduction`` and ``unit`` have values that the domain allows."""
    for group, name, of in (
        ("loss", "reduction", _REDUCTIONS),
        ("controller", "unit", _UNITS),
        ("loss", "unit", _UNITS),
    ):
        value, (allowed, remedy) = getattr(getattr(c, group), name, None), of[c.domain]
        if value is not None and value not in allowed:
            raise ConfigError(f"{group}.{name}={value}: {remedy}")


def check_lr(c: JobConfig) -> None:
    """The learning rate starts at or above its floor; with kl_adaptive, within its bounds."""
    if c.optim.lr_floor > c.optim.lr and c.optim.rate == "linear":
        raise ConfigError(
            f"optim.lr_floor={c.optim.lr_floor:g}: above optim.lr={c.optim.lr:g}; "
            "the learning rate falls from lr to lr_floor"
        )
    if c.optim.lr_min > c.optim.lr_max:
        raise ConfigError(
            f"optim.lr_min={c.optim.lr_min:g}: above optim.lr_max={c.optim.lr_max:g}; swap them"
        )
    if c.optim.rate == "kl_adaptive" and not c.optim.lr_min <= c.optim.lr <= c.optim.lr_max:
        raise ConfigError(
            f"optim.lr={c.optim.lr:g}: outside optim.lr_min={c.optim.lr_min:g} .. "
            f"optim.lr_max={c.optim.lr_max:g}; start inside the bounds"
        )


def check_beta(c: JobConfig) -> None:
    """Beta starts within its bounds; the forward rule has no bounds."""
    loss = c.loss
    if not isinstance(loss, KLPENConfig):
        return
    if loss.beta_rule == "custom" and loss.own_beta_rule is None:
        raise ConfigError(
            "loss.beta_rule=custom: no class; add loss.own_beta_rule.target=package.module:Name"
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


def check_kl(c: JobConfig) -> None:
    """A custom estimator or divergence has a target, and the placement allows both."""
    if isinstance(c.kl, RetrieveKLConfig):
        for name in ("estimator", "divergence"):
            if getattr(c.kl, name) == OWN and getattr(c.kl, f"own_{name}") is None:
                raise ConfigError(
                    f"kl.{name}=custom: no function; add kl.own_{name}.target=package.module:name"
                )
        check_divergence(c.kl.divergence, c.kl.placement, c.kl.estimator)
        check_placement(c.kl.placement, c.kl.estimator, c.kl.allow_biased)


def check_kl_apply(c: JobConfig) -> None:
    """With ``kl.apply=step``, the reverse KL is charged in the reward."""
    if not isinstance(c.kl, RetrieveKLConfig) or c.kl.apply != "step":
        return
    if c.kl.placement == "loss":
        raise ConfigError(
            "kl.apply=step: kl.placement=loss charges no reward; use kl.apply=rollout"
        )
    if c.kl.divergence != "reverse":
        raise ConfigError(
            f"kl.apply=step: charges the reverse KL alone; with kl.divergence={c.kl.divergence} "
            "use kl.apply=rollout"
        )


def check_controller_target(c: JobConfig) -> None:
    """The target of a Jensen-Shannon divergence is below ln 2, its largest value."""
    controller = c.controller
    if not isinstance(c.kl, RetrieveKLConfig) or c.kl.divergence != "js":
        return
    if not isinstance(controller, TargetControllerConfig) or controller.unit == "sequence":
        return
    if controller.target >= math.log(2):
        raise ConfigError(
            f"controller.target={controller.target:g}: kl.divergence=js never reaches ln 2 = 0.693 "
            "nats in one state; choose a smaller target"
        )


def check_reward_weight(c: JobConfig) -> None:
    """With ``advantage.reward_weight=0`` a penalty must be charged, or nothing would be learned."""
    rises = isinstance(c.controller, ScheduleControllerConfig) and c.controller.end > 0
    charged = isinstance(c.kl, LegacyKLConfig) and (c.kl.coef != 0 or rises)
    if c.advantage.reward_weight == 0 and not charged:
        what = "kl.coef=0" if c.has_reference else "kl=none"
        raise ConfigError(
            f"advantage.reward_weight=0: with {what} there is nothing to learn from; "
            "use kl=retrieve kl.coef=1"
        )


def check_first_coef(c: JobConfig) -> None:
    """A coefficient that follows from the first rollout is constant afterwards, and of control."""
    if not isinstance(c.kl, LegacyKLConfig) or c.kl.coef is not None:
        return
    if c.domain != CONTROL or c.controller.name != "fixed" or c.advantage.reward_weight == 0:
        raise ConfigError(
            "kl.coef=null: what a step earns sets it, for control with controller=fixed and a "
            "reward; give a number"
        )


def check_coef_bounds(c: JobConfig) -> None:
    """A coefficient that the controller multiplies starts within its bounds."""
    controller = c.controller
    if not isinstance(c.kl, LegacyKLConfig) or not isinstance(controller, TargetControllerConfig):
        return
    coef = c.kl.first_coef
    if not controller.coef_min <= coef <= controller.coef_max:
        raise ConfigError(
            f"kl.coef={coef:g}: controller={controller.name} multiplies it, within "
            f"controller.coef_min={controller.coef_min:g} .. "
            f"controller.coef_max={controller.coef_max:g}; start within them"
        )


def check_logger_also(c: JobConfig) -> None:
    """``logger.also`` has no logger twice, none with settings, and not the chosen one."""
    plain = [name for name, each in CHOICES["logger"].items() if each.schema is LoggerConfig]
    fitting = sorted({*plain} - {"none", c.logger.name})
    if sorted(map(str, c.logger.also)) not in ([], *([each] for each in fitting), fitting):
        raise ConfigError(
            f"logger.also=[{','.join(map(str, c.logger.also))}]: may add "
            f"{', '.join(fitting) or 'nothing'} to logger={c.logger.name}, each once"
        )


def check_sampler(c: JobConfig) -> None:
    """The sampler's mismatch is corrected once, by a loss that can correct it."""
    loss, weight = c.loss, c.loss.sampler_weight
    if weight is not None:
        words = f"loss.sampler_weight={weight}:"
        if c.anchor == "sampler":
            ratio = "loss=dppo" if loss.name == "dppo" else "loss.anchor=sampler"
            raise ConfigError(
                f"{words} {ratio} divides by the sampler, so it would count twice; drop one"
            )
        if not isinstance(loss, ClipConfig | KLPENConfig | TRPOConfig):
            raise ConfigError(f"{words} loss={loss.name} has no ratio to weight; drop it")
        low, high = loss.sampler_low or 1.0, loss.sampler_high or 1.0
        if low > 1.0 or high < 1.0:  # else no step of an unchanged policy would be learned from
            limit = f"loss.sampler_low={low:g}" if low > 1.0 else f"loss.sampler_high={high:g}"
            raise ConfigError(
                f"{limit}: 1 is the weight where both policies agree; take sampler_low <= 1 <= "
                "sampler_high"
            )
    stale, elsewhere = c.collector.staleness, c.sampled_elsewhere
    setting = f"collector.staleness={stale}" if stale else "collector.dtype=bfloat16"
    if elsewhere and c.collector.imitates:
        raise ConfigError(f"{setting}: collector={c.collector.name} samples nothing; drop it")
    if elsewhere and isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(f"{setting}: kl.apply=step samples when it charges; use kl.apply=rollout")


def check_imitation(c: JobConfig) -> None:
    """A job that imitates data uses loss=nll or a custom loss, and no reference."""
    data, imitates = f"collector={c.collector.name}", c.collector.imitates
    if imitates and c.loss.name not in ("nll", "custom"):
        raise ConfigError(
            f"loss={c.loss.name}: {data} reads actions that another policy chose; use loss=nll, or "
            "loss=custom"
        )
    if c.loss.name == "nll" and not imitates:
        remedy = "start from experiment=clone or experiment=sft"
        raise ConfigError(f"loss=nll: {data} reads no data; {remedy}")
    if imitates and c.has_reference:
        raise ConfigError(
            f"kl={c.kl.name}: is estimated from the policy's own actions, but {data} reads the "
            "data's; use kl=none, and measure with klrl kl"
        )
