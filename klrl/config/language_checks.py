"""What takes two settings to be wrong in a language job; no torch in here."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import (
    GroupConfig,
    LanguageConfig,
    SortDigitsConfig,
    TextConfig,
)
from klrl.config.unread import Unread

MOST_DIGITS = 64
#: Positions of the small base model; a prompt takes 8 + digits tokens, and 20 more per shot.
BASE_CONTEXT = 256


def check_language(c: LanguageConfig) -> None:
    """Refuse combinations that each setting alone allows.

    Raises:
        ConfigError: the setting, its value, the remedy.
    """
    _check_task(c)
    _check_groups(c)
    _check_adapters(c)
    if getattr(c.kl, "apply", "rollout") == "step":
        raise ConfigError(
            "kl.apply=step: the KL of a response is known when it is complete; use kl.apply=rollout"
        )
    if c.loss.reduction not in ("token", "sequence"):
        raise ConfigError(
            f"loss.reduction={c.loss.reduction}: control only; choose token (mean over tokens) or "
            "sequence (sum over a response, mean over responses)"
        )
    if c.learner.compile not in ("auto", "false"):
        raise ConfigError(
            f"learner.compile={c.learner.compile}: a language model's update runs eagerly; use "
            "learner.compile=false"
        )


def _check_task(c: LanguageConfig) -> None:
    env = c.env
    if isinstance(env, TextConfig):
        if env.reward in ("exact", "proxy"):
            raise ConfigError(
                f"env.reward={env.reward}: belongs to env=sort_digits; name a function of yours as "
                "package.module:function"
            )
        if c.actor.model is None and c.actor.init is None:
            raise ConfigError(
                "actor.model=null: env=text needs a model; give a folder that save_pretrained "
                "wrote, or a hub id"
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


def _check_adapters(c: LanguageConfig) -> None:
    lora = c.actor.lora
    if c.reference.name == "adapter_off" and lora.r == 0 and c.kl.name != "none":
        raise ConfigError(
            "reference=adapter_off: actor.lora.r=0 has no adapters to switch off; set "
            "actor.lora.r=8, or choose reference=initial"
        )
    if lora.dropout:
        raise ConfigError(
            f"actor.lora.dropout={lora.dropout:g}: the updated policy would not be the one that "
            "sampled; set it to 0"
        )
    targets = lora.target_modules
    listed = isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)
    if targets != "all-linear" and not listed:
        raise ConfigError(
            f"actor.lora.target_modules={targets}: give names as in [q_proj,v_proj], or all-linear"
        )


def _no_critic(c: LanguageConfig) -> bool:
    return isinstance(c.advantage, GroupConfig)


_grouped = "advantage=group has no critic; drop it or choose advantage=gae"
_full = "actor.lora.r=0 has no adapters; set actor.lora.r"
UNREAD_LANGUAGE = (
    *(
        Unread(f"loss.{name}", _no_critic, _grouped)
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
