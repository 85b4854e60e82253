"""A control run's policy on another environment. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.config import Config, EnvConfig, JobConfig
from klrl.control.preflight import check_env, policy_kind
from klrl.runs.other_task import allowed
from klrl.runs.resume import stored_config

_CONTROL = ("env.id", "env.kwargs")


def control_on_task(run: Path, own: Config, words: Sequence[str]) -> JobConfig:
    """:func:`config_on_task` of a control run."""
    asked = allowed(words, _CONTROL)
    # Another environment knows nothing of this one's arguments.
    fresh = ["env.kwargs={}"] if any(word.startswith("env.id=") for word in asked) else []
    config = stored_config(run, [*fresh, *asked], changeable=_CONTROL)
    assert isinstance(config, Config)
    check_env(config.env, config.actor, frozenset())
    _check_same_numbers(own, config.env, words)
    return config


def _check_same_numbers(own: Config, env: EnvConfig, words: Sequence[str]) -> None:
    mine, theirs = policy_kind(own.env, own.actor), policy_kind(env, own.actor)
    names = ("action distribution", "observation", "action")
    for name, ours, others in zip(names, mine, theirs, strict=True):
        if ours != others:
            raise ConfigError(
                f"{' '.join(words)}: its {name} is {others}, the policy's is {ours}; "
                "give a task with the same"
            )
