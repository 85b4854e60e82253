"""Rules for language jobs."""

from __future__ import annotations

import re

from klrl.base.errors import ConfigError
from klrl.config import (
    GroupConfig,
    InstructionsConfig,
    LanguageConfig,
    LegacyKLConfig,
    RetrieveKLConfig,
    SortDigitsConfig,
    TextConfig,
)
from klrl.config.objectives import SHAPED

_MOST_DIGITS = 64
#: Arguments of ``apply_chat_template`` that klrl sets itself.
_RENDERING = ("add_generation_prompt", "tokenize", "return_dict", "conversation", "chat_template")


def check_reward(c: LanguageConfig) -> None:
    """Each reward is listed once, and is not a built-in reward of another task."""
    names = c.env.rewards
    shown = f"[{','.join(map(str, names))}]" if isinstance(c.env.reward, list) else c.env.reward
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"env.reward={shown}: give the name of a reward, or a list of names")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"env.reward={shown}: names {twice[0]} twice; give env.reward_weights")
    for task, schema in (("sort_digits", SortDigitsConfig), ("instructions", InstructionsConfig)):
        others = [name for name in names if name in {*schema.own_rewards} - {*c.env.own_rewards}]
        if others:
            raise ConfigError(
                f"env.reward={shown}: {others[0]} belongs to env={task}; give your own function as "
                "package.module:function"
            )


def check_reward_weights(c: LanguageConfig) -> None:
    """Each reward has a weight, and not all weights are 0."""
    weights, count = c.env.reward_weights, len(c.env.rewards)
    if weights is None:
        return
    if len(weights) != count:
        raise ConfigError(
            f"env.reward_weights={weights}: {len(weights)} weights for {count} "
            f"reward{'s' * (count != 1)}; give one for each name in env.reward"
        )
    if not any(weights):
        raise ConfigError(
            f"env.reward_weights={weights}: leaves no reward; give one that is not 0, or learn "
            "from the penalty alone with advantage.reward_weight=0"
        )


def check_template(c: LanguageConfig) -> None:
    """``template_kwargs`` omits what klrl sets."""
    for name in c.env.template_kwargs if isinstance(c.env, TextConfig) else ():
        if name in _RENDERING:
            raise ConfigError(f"env.template_kwargs.{name}: klrl sets it; drop it")


def check_model(c: LanguageConfig) -> None:
    """``actor.model`` or ``actor.init`` is given; env=sort_digits has a default model."""
    own = isinstance(c.env, SortDigitsConfig)
    if not own and c.actor.model is None and c.actor.init is None:
        remedy = "give a folder written by save_pretrained, a hub id, or smollm2"
        raise ConfigError(f"actor.model=null: env={c.env.name} needs a model; {remedy}")


def check_sort_digits(c: LanguageConfig) -> None:
    """Numbers of digits are valid; klrl's base model gets no worked examples (``env.shots``)."""
    env = c.env
    if not isinstance(env, SortDigitsConfig):
        return
    if not env.shortest <= env.longest <= _MOST_DIGITS:
        raise ConfigError(
            f"env.longest={env.longest}: must be from env.shortest={env.shortest} to {_MOST_DIGITS}"
        )
    if c.actor.model is None and env.shots:
        raise ConfigError(
            f"env.shots={env.shots}: klrl's base model (actor.model=null) has learned without "
            "worked examples; set 0, or give a model: python -m benchmarks.sort_digits_base "
            f"FOLDER --shots {env.shots} makes one"
        )


def check_group_size(c: LanguageConfig) -> None:
    """``advantage=group`` needs two sampled responses to a prompt to compare."""
    size = c.collector.group_size
    if c.collector.imitates:
        if size != 1:
            raise ConfigError(f"collector.group_size={size}: a row has one answer; drop it")
        baseline = c.advantage.baseline if isinstance(c.advantage, GroupConfig) else "mean"
        if c.loss.name == "custom" and baseline != "mean":
            raise ConfigError(
                f"advantage.baseline={baseline}: a row has one answer, so the advantage is "
                "NaN; choose mean, and read no advantage in loss.target"
            )
    elif isinstance(c.advantage, GroupConfig) and size < 2:
        raise ConfigError(
            f"collector.group_size={size}: advantage=group compares the responses to a prompt; "
            "give >= 2, or choose advantage=gae"
        )


def check_minibatches_of_prompts(c: LanguageConfig) -> None:
    """All minibatches have the same number of prompts."""
    if c.collector.prompts % c.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: does not divide collector.prompts="
            f"{c.collector.prompts}, whose groups stay together; choose a divisor"
        )


def check_shaped(c: LanguageConfig) -> None:
    """``baseline=normalized_shaped`` divides score and KL by a std: the KL is in the reward."""
    if not isinstance(c.advantage, GroupConfig) or c.advantage.baseline != SHAPED:
        return
    words = f"advantage.baseline={SHAPED}: divides score and KL by the group's std, but"
    if not c.has_reference:
        raise ConfigError(f"{words} kl=none has no KL; choose advantage.baseline=normalized")
    if isinstance(c.kl, RetrieveKLConfig) and c.kl.placement != "reward":
        raise ConfigError(
            f"{words} kl.placement={c.kl.placement} charges it in the loss, undivided; choose "
            "kl.placement=reward or advantage.baseline=leave_one_out"
        )


def check_adapter_off(c: LanguageConfig) -> None:
    """``reference=adapter_off`` requires a policy with adapters."""
    if c.reference.name == "adapter_off" and c.actor.lora.r == 0 and c.has_reference:
        raise ConfigError(
            "reference=adapter_off: actor.lora.r=0 has no adapters to switch off; set "
            "actor.lora.r=8, or choose reference=initial"
        )


def check_lora(c: LanguageConfig) -> None:
    """Adapters have valid ``target_modules``, and no dropout, which would change the policy."""
    lora = c.actor.lora
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


def check_language_step(c: LanguageConfig) -> None:
    """With ``kl.apply=step``, the estimator uses sampled tokens, and arithmetic is not bfloat16."""
    if not isinstance(c.kl, LegacyKLConfig) or c.kl.apply != "step":
        return
    if isinstance(c.kl, RetrieveKLConfig) and c.kl.estimator == "exact":
        raise ConfigError(
            "kl.estimator=exact: kl.apply=step retrieves log-probs of the sampled tokens alone; "
            "use kl.placement=reward kl.estimator=k1, or kl.apply=rollout"
        )
    if c.mixed or c.actor.dtype == "bfloat16":
        mixed = c.learner.dtype == "mixed"
        dtype = "learner.dtype=mixed" if mixed else "actor.dtype=bfloat16"
        raise ConfigError(
            f"{dtype}: with kl.apply=step the loss uses the log-probs of sampling, rounded to "
            "bfloat16; compute in float32, or use kl.apply=rollout, which scores the tokens again"
        )


def check_compile(c: LanguageConfig) -> None:
    """The update of a language model is never compiled."""
    if c.learner.compile not in ("auto", "false"):
        raise ConfigError(
            f"learner.compile={c.learner.compile}: a language model's update runs eagerly; use "
            "learner.compile=false"
        )


def check_learner_dtype(c: LanguageConfig) -> None:
    """``learner.dtype`` fits ``actor.dtype``, and adapters if there are any."""
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
    """A micro-batch is no larger than a minibatch, and has one size."""
    size, prompts = c.learner.micro_batch, c.collector.prompts // c.learner.minibatches
    if size is not None and c.learner.tokens_per_batch is not None:
        raise ConfigError(
            f"learner.micro_batch={size}: learner.tokens_per_batch={c.learner.tokens_per_batch} "
            "sizes micro-batches too; drop one of the two"
        )
    if size is not None and size > prompts:
        raise ConfigError(
            f"learner.micro_batch={size}: give at most {prompts}, one minibatch (collector.prompts="
            f"{c.collector.prompts} / learner.minibatches={c.learner.minibatches})"
        )


def check_stale_states(c: LanguageConfig) -> None:
    """No critic values a stale rollout's hidden states."""
    stale = c.collector.staleness
    if stale and not isinstance(c.advantage, GroupConfig) and not c.collector.imitates:
        raise ConfigError(
            f"collector.staleness={stale}: advantage=gae would value older states; choose "
            "advantage=group"
        )


def check_sampler_dtype(c: LanguageConfig) -> None:
    """``collector.dtype`` differs from the arithmetic of training, which is float32."""
    if c.collector.dtype is not None and (c.mixed or c.actor.dtype != "float32"):
        mixed = c.learner.dtype == "mixed"
        other = "learner.dtype=mixed" if mixed else f"actor.dtype={c.actor.dtype}"
        raise ConfigError(
            f"collector.dtype={c.collector.dtype}: is for a policy in float32, not {other}; drop it"
        )


def check_exact(c: LanguageConfig) -> None:
    """``kl.exact`` measures what is charged, on klrl's own path."""
    if c.kl.exact == "always":
        return
    if not re.fullmatch("charged|every:[1-9][0-9]*", c.kl.exact):
        raise ConfigError(f"kl.exact={c.kl.exact}: choose always, charged or every:N, as every:10")
    if c.kl.exact != "charged" and getattr(c.kl, "estimator", "") == "exact":
        raise ConfigError(
            f"kl.exact={c.kl.exact}: kl.estimator=exact charges the exact KL in every rollout; use "
            "kl.exact=charged, or kl.placement=loss kl.estimator=k3"
        )
    if isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(
            f"kl.exact={c.kl.exact}: kl.apply=step keeps the hidden states; use kl.apply=rollout"
        )
