"""A run's policy on another task: words such as ``env.kwargs.g=14`` over its stored ``env``.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.config import Config, EnvConfig, JobConfig, LanguageConfig
from klrl.control.preflight import check_env, policy_kind
from klrl.domains import domain_of
from klrl.runs.resume import stored_config

_CONTROL = ("env.id", "env.kwargs")
_LANGUAGE = ("env.reward", "env.shortest", "env.longest", "env.eval_data")


def config_on_task(run: Path, words: Sequence[str]) -> JobConfig:
    """The settings of a run with another task in place of its own.

    Args:
        run: the run folder.
        words: ``key=value``. Control: ``env.id``, which starts from no ``env.kwargs``, and
            ``env.kwargs.*``. Language: the reward and the lengths or data of its prompts.

    Raises:
        ConfigError: another key, an environment that cannot be made, or one that shows or takes
            other numbers than the policy's own.
    """
    own = stored_config(run)
    if not words:
        return own
    return domain_of(own).on_task(run, own, words)


def language_on_task(run: Path, own: LanguageConfig, words: Sequence[str]) -> JobConfig:
    """:func:`config_on_task` of a language run."""
    kept = [name for name in _LANGUAGE if hasattr(own.env, name.partition(".")[2])]
    return stored_config(run, _allowed(words, kept), changeable=kept)


def control_on_task(run: Path, own: Config, words: Sequence[str]) -> JobConfig:
    """:func:`config_on_task` of a control run."""
    asked = _allowed(words, _CONTROL)
    # Another environment knows nothing of this one's arguments.
    fresh = ["env.kwargs={}"] if any(word.startswith("env.id=") for word in asked) else []
    config = stored_config(run, [*fresh, *asked], changeable=_CONTROL)
    assert isinstance(config, Config)
    check_env(config.env, config.actor, frozenset())
    _check_same_numbers(own, config.env, words)
    return config


def _allowed(words: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The words, ``env.id`` first; their keys must be these or stand below one of them."""
    for word in map(str, words):
        key, sign, _ = word.partition("=")
        if not sign or not any(key == may or key.startswith(f"{may}.") for may in keys):
            shown = ", ".join(f"{k}.*" if k == "env.kwargs" else k for k in keys)
            raise ConfigError(f"{word}: evaluation keeps it; give KEY=VALUE of {shown}")
    return sorted(words, key=lambda word: not word.startswith("env.id="))


def _check_same_numbers(own: Config, env: EnvConfig, words: Sequence[str]) -> None:
    mine, theirs = policy_kind(own.env, own.actor), policy_kind(env, own.actor)
    names = ("action distribution", "observation", "action")
    for name, ours, others in zip(names, mine, theirs, strict=True):
        if ours != others:
            raise ConfigError(
                f"{' '.join(words)}: its {name} is {others}, the policy's is {ours}; "
                "give a task with the same"
            )
