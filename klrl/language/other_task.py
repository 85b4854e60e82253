"""A language run's policy on other prompts or another reward. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.config import JobConfig, LanguageConfig
from klrl.runs.other_task import allowed
from klrl.runs.resume import stored_config

_LANGUAGE = ("env.reward", "env.shortest", "env.longest", "env.eval_data")


def language_on_task(run: Path, stored: LanguageConfig, overrides: Sequence[str]) -> JobConfig:
    """:func:`klrl.runs.other_task.config_on_task` of a language run."""
    changeable = [name for name in _LANGUAGE if hasattr(stored.env, name.partition(".")[2])]
    return stored_config(run, allowed(overrides, changeable), changeable=changeable)
