"""Settings that a job never reads, each with the reason; giving one of them is refused.

To add one: an :class:`Unread` in the tuple of its domain, or of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from klrl.base.errors import ConfigError
from klrl.config import (
    CONTROL,
    LANGUAGE,
    ClipConfig,
    GroupConfig,
    JobConfig,
)


@dataclass(frozen=True)
class Unread:
    """A rule on settings or whole groups; ``keys`` with spaces between them."""

    keys: str
    unread: Callable[[Any], bool]  # whether a job never reads it; asked where it was given
    reason: str
    anyway: Any = ...  # the value that asks for what happens anyway, and passes


def _own(group: str, name: str) -> Unread:
    choice = attrgetter(f"{group}.{name}")
    reason = f"only {group}.{name}=custom reads it; set that, or drop it"
    return Unread(f"{group}.own_{name}", lambda c: choice(c) != "custom", reason, anyway=None)


_no_entropy = "loss.entropy_bonus=false never reads it; drop it or set loss.entropy_bonus=true"
_no_evaluation = "eval.every=0 never evaluates, nor does eval.evaluations=0; drop it"
_UNREAD_BOTH = (
    _own("kl", "estimator"),
    _own("kl", "divergence"),
    _own("loss", "beta_rule"),
    Unread(
        "kl.samples_mc_js",
        lambda c: c.kl.divergence not in ("js", "custom"),
        "only kl.divergence=js draws samples, and custom; drop it or set one of them",
    ),
    Unread(
        "loss.gain",
        lambda c: c.loss.beta_rule != "proportional",
        "only loss.beta_rule=proportional reads it; drop it or set that",
    ),
    Unread(
        "loss.increment loss.decrement",
        lambda c: c.loss.beta_rule == "proportional",
        "loss.beta_rule=proportional reads loss.gain instead; drop it",
    ),
    Unread(
        "loss.unit",
        lambda c: isinstance(c.loss, ClipConfig) and c.loss.target_kl is None,
        "loss.target_kl=null is no cap; set it, or drop the unit",
    ),
    Unread("loss.entropy_coeff", lambda c: not c.loss.entropy_bonus, _no_entropy, anyway=0),
    Unread(
        "loss.beta_min loss.beta_max",
        lambda c: c.loss.beta_rule == "forward",
        "loss.beta_rule=forward has no bounds, as in TorchRL; use loss.beta_rule=doubling",
    ),
    *(
        Unread(group, lambda c: not c.has_reference, f"kl=none has no {group}; drop it")
        for group in ("reference", "controller")
    ),
    Unread("eval.episodes eval.steps", lambda c: not c.eval.on, _no_evaluation),
    Unread("eval.final", lambda c: not c.eval.on, _no_evaluation, anyway=0),
    Unread("eval.sampled", lambda c: not c.eval.on, _no_evaluation),
    Unread("eval.share", lambda c: not c.eval.on, "eval.evaluations=0 never evaluates; drop it"),
    Unread(
        "eval.evaluations eval.share",
        lambda c: c.eval.every is not None and c.eval.every + c.eval.evaluations > 0,
        "eval.every says when to evaluate, whatever it costs; drop one of the two",
    ),
)
_UNREAD_CONTROL = (
    Unread("env.id", lambda c: c.env.name == "custom", "env=custom has env.target; set that"),
    Unread("env.kwargs", lambda c: c.env.name == "custom", "env=custom has env.args; set that"),
    Unread(
        "kl.samples_mc_js",
        lambda c: c.actor.name == "categorical",
        "of a categorical the js is a sum; drop it",
    ),
    Unread(
        "loss.samples_mc_kl",
        lambda c: c.loss.kl_old != "sampled",
        "loss.kl_old=exact draws no samples; set loss.kl_old=sampled",
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
        anyway=False,
    ),
)
_UNREAD_LANGUAGE = (
    Unread("eval.steps", lambda c: True, "a response is one step; set eval.episodes"),
    Unread("kl.samples_mc_js", lambda c: True, "of tokens the js is a sum; drop it"),
    Unread(
        "env.eval_share",
        lambda c: (c.env.eval_data or c.env.eval_split) is not None,
        "env.eval_data and env.eval_split say which prompts evaluate; drop it",
    ),
    Unread(
        "loss.critic_coeff loss.loss_critic_type loss.clip_value loss.separate_losses",
        lambda c: isinstance(c.advantage, GroupConfig),
        "advantage=group has no critic; drop it or choose advantage=gae",
    ),
    Unread(
        "actor.lora.alpha actor.lora.dropout actor.lora.target_modules",
        lambda c: c.actor.lora.r == 0,
        "actor.lora.r=0 has no adapters; set actor.lora.r",
    ),
    Unread(
        "loss.samples_mc_kl",
        lambda c: True,
        "a language job samples KL(old||new) from the responses; drop it",
    ),
    Unread(
        "loss.samples_mc_entropy",
        lambda c: True,
        "a token's entropy has a closed form; drop it",
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
    """Refuse an override, given by its key, that the chosen composition never reads."""
    given = sorted(overridden)
    for rule in UNREAD[config.domain]:
        for setting in rule.keys.split():
            named = [key for key in given if f"{key}.".startswith(f"{setting}.")]
            if not named or not rule.unread(config):
                continue
            if rule.anyway is ... or attrgetter(setting)(config) != rule.anyway:
                raise ConfigError(f"{named[0]}: nothing reads it here: {rule.reason}")
