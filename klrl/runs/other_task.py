"""A run's policy on another task: words such as ``env.kwargs.g=14`` over its stored ``env``.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.config import JobConfig
from klrl.config.overrides import key_of
from klrl.domains import domain_of
from klrl.runs.resume import stored_config


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


def allowed(words: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The words, ``env.id`` first; their keys must be these or stand below one of them."""
    for word in map(str, words):
        key = key_of(word)
        if "=" not in word or not any(key == may or key.startswith(f"{may}.") for may in keys):
            shown = ", ".join(f"{k}.*" if k == "env.kwargs" else k for k in keys)
            raise ConfigError(f"{word}: evaluation keeps it; give KEY=VALUE of {shown}")
    return sorted(words, key=lambda word: not word.startswith("env.id="))
