"""Where a run's base model lies now: its folder may have moved, or the run come from elsewhere.

A run names its model as it was typed, so that a relative folder is found from one place alone.
"""

from __future__ import annotations

from dataclasses import replace

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.config import LanguageConfig
from klrl.language import smollm
from klrl.language.model_files import find_model


def moved(config: LanguageConfig, model: str | None) -> LanguageConfig:
    """The same job with its base model in another folder; None: where it was."""
    if model is None:
        return config
    if not expanded(model).is_dir():
        raise ConfigError(
            f"--model={model}: no such folder; give the one that holds the run's base model"
        )
    return with_model(config, model)


def with_model(config: LanguageConfig, model: str | None) -> LanguageConfig:
    """The same job with another ``actor.model``."""
    return replace(config, actor=replace(config.actor, model=model))


def check_place(config: LanguageConfig, remedy: str = "--model FOLDER") -> None:
    """Look for the base model of a run that is not to be trained.

    Args:
        config: the run's settings.
        remedy: how its new place is told.
    """
    model = config.actor.model
    if model is None or model == smollm.NAME:
        return
    try:
        find_model(model)
    except ConfigError as error:
        found, _, _ = str(error).rpartition(";")  # its own remedy is for who begins a run
        raise ConfigError(f"{found}; say where it is now with {remedy}") from error
