"""Changes the task in a stored run's settings by overrides such as ``env.kwargs.g=14``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.config import JobConfig
from klrl.config.given import Given, quoted
from klrl.config.overrides import parse
from klrl.config.own.trust import NAMED
from klrl.domains import domain_of
from klrl.runs.resume import stored_config

#: Settings that are dictionaries with arbitrary keys.
_OPEN = ("env.kwargs", "env.args")


def config_on_task(run: Path, overrides: Sequence[str]) -> JobConfig:
    """Return the settings of a stored run, changed by overrides of its task.

    In control, overrides may set ``env.id`` (this clears ``env.kwargs``) and ``env.kwargs.*`` or,
    for ``env=custom``, ``env.args.*``. In language, they may set the model, reward and prompts.
    """
    NAMED.update(overrides)
    own = stored_config(run)
    if not overrides:
        return own
    config: JobConfig = domain_of(own).function("on_task")(run, own, overrides)
    return config


def allowed(overrides: Sequence[str], keys: Sequence[str]) -> list[Given]:
    """Refuse overrides of keys outside ``keys``; return the others, ``env.id`` first."""
    for override in map(str, overrides):
        key = Given(override).key
        if "=" not in override or not any(key == k or key.startswith(f"{k}.") for k in keys):
            shown = ", ".join(f"{k}.*" if k in _OPEN else k for k in keys)
            raise ConfigError(f"{override}: evaluation cannot set it; give one RUN, then {shown}")
    return sorted(parse(map(quoted, overrides)), key=lambda each: each.key != "env.id")
