"""``env`` and ``collector`` against other settings: the task, and how a rollout is shared out."""

from __future__ import annotations

import math

from klrl.base.errors import ConfigError
from klrl.config import (
    Config,
    GroupConfig,
    InstructionsConfig,
    LanguageConfig,
    RayCollectorConfig,
    SortDigitsConfig,
    TextConfig,
)
from klrl.config.rules import refuse_empty

MOST_DIGITS = 64


def check_workers(c: Config) -> None:
    """Ray's workers share the copies equally."""
    if not isinstance(c.collector, RayCollectorConfig):
        return
    if c.env.num_envs % c.collector.workers:
        raise ConfigError(
            f"collector.workers={c.collector.workers}: does not divide env.num_envs="
            f"{c.env.num_envs}, and every worker steps equally many copies; choose a divisor"
        )


def check_window(c: Config) -> None:
    """A window for each copy, closed with the copies of an evaluation, would end the run."""
    if c.env.kwargs.get("render_mode") == "human":
        raise ConfigError(
            "env.kwargs.render_mode=human: training opens no windows; drop it, "
            "klrl evaluate RUN --video films the trained policy"
        )


def check_reward(c: LanguageConfig) -> None:
    """Names of rewards, each once; a task of the user's own has the user's own."""
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
    """A finite weight for each reward, not all of them 0."""
    weights, count = c.env.reward_weights, len(c.env.rewards)
    if weights is None:
        return
    if len(weights) != count:
        raise ConfigError(
            f"env.reward_weights={weights}: {len(weights)} weights for {count} "
            f"reward{'s' * (count != 1)}; give one for each name in env.reward"
        )
    if not all(map(math.isfinite, weights)):
        raise ConfigError(f"env.reward_weights={weights}: give finite numbers")
    if not any(weights):
        raise ConfigError(
            f"env.reward_weights={weights}: leaves no reward; give one that is not 0, or learn "
            "from the penalty alone with advantage.reward_weight=0"
        )


#: Arguments of a chat template's rendering that klrl gives itself.
_RENDERING = ("add_generation_prompt", "tokenize", "return_dict", "conversation", "chat_template")


def check_data(c: LanguageConfig) -> None:
    """Data that are named; a share that leaves some; template arguments that are the user's."""
    if not isinstance(c.env, TextConfig):
        return
    refuse_empty("env.data", c.env.data, "give data files: env.data=prompts.jsonl")
    remedy = "give data files, or null for those of env.data"
    refuse_empty("env.eval_data", c.env.eval_data, remedy)
    if c.env.eval_share >= 1:
        raise ConfigError(f"env.eval_share={c.env.eval_share}: give a share below 1")
    for name in c.env.template_kwargs:
        if name in _RENDERING:
            raise ConfigError(f"env.template_kwargs.{name}: klrl sets it; drop it")


def check_digits(c: LanguageConfig) -> None:
    """Lengths of lists that there are; no shots for klrl's base model, which answers none so."""
    env = c.env
    if not isinstance(env, SortDigitsConfig):
        return
    if not env.shortest <= env.longest <= MOST_DIGITS:
        raise ConfigError(
            f"env.longest={env.longest}: give env.shortest={env.shortest} .. {MOST_DIGITS}"
        )
    if c.actor.model is None and env.shots:
        raise ConfigError(
            f"env.shots={env.shots}: klrl's base model (actor.model=null) has learned without "
            "worked examples; set 0, or give a model: python -m benchmarks.sort_digits_base "
            f"FOLDER --shots {env.shots} makes one"
        )


def check_group_size(c: LanguageConfig) -> None:
    """A group is compared with itself."""
    size = c.collector.group_size
    if isinstance(c.advantage, GroupConfig) and size < 2:
        raise ConfigError(
            f"collector.group_size={size}: advantage=group compares the responses to a prompt; "
            "give >= 2, or choose advantage=gae"
        )
