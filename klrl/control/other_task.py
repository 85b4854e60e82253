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


def control_on_task(run: Path, stored: Config, overrides: Sequence[str]) -> JobConfig:
    """:func:`klrl.runs.other_task.config_on_task` of a control run."""
    checked = allowed(overrides, _CONTROL)
    # Another environment does not take this one's arguments.
    reset = ["env.kwargs={}"] if any(o.startswith("env.id=") for o in checked) else []
    config = stored_config(run, [*reset, *checked], changeable=_CONTROL)
    assert isinstance(config, Config)
    check_env(config.env, config.actor, frozenset())
    _check_same_kind(stored, config.env, overrides)
    return config


def _check_same_kind(stored: Config, env: EnvConfig, overrides: Sequence[str]) -> None:
    trained, task = policy_kind(stored.env, stored.actor), policy_kind(env, stored.actor)
    names = ("action distribution", "observation", "action")
    for name, policy_value, task_value in zip(names, trained, task, strict=True):
        if policy_value != task_value:
            raise ConfigError(
                f"{' '.join(overrides)}: its {name} is {task_value}, the policy's is "
                f"{policy_value}; give a task with the same"
            )
