"""What a language job needs of this machine, looked at before anything is written or built."""

from __future__ import annotations

from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig
from klrl.runs.find import other_runs
from klrl.runs.machine import check_language_packages


def check_job(config: LanguageConfig, overridden: frozenset[str], *, resumed: bool) -> None:
    """The part of a language job; arguments as :func:`klrl.runs.machine.check_machine`."""
    check_language_packages(config)
    _check_files(config, resumed=resumed)


def _check_files(config: LanguageConfig, *, resumed: bool) -> None:
    """Refuse a job whose data, reward function, model folder or other run is missing.

    Args:
        config: the checked job.
        resumed: whether the run goes on from its own checkpoint.

    Raises:
        ConfigError: with the setting and the remedy.
    """
    # They import the packages that were just looked for.
    from klrl.language.load import language_config, same_network
    from klrl.language.tasks import make_task

    make_task(config.env, config.seed)
    model = config.actor.model
    if model is not None and Path(model).expanduser().is_file():
        raise ConfigError(f"actor.model={model}: is a file; give a folder of save_pretrained")
    if resumed:
        return
    for setting, path, run in other_runs(config):
        other = language_config(run, setting)
        if setting == "actor.init" and not same_network(config.actor, other.actor):
            raise ConfigError(
                f"{setting}={path}: its network is actor.model={other.actor.model} with "
                f"actor.lora.r={other.actor.lora.r}; choose the same actor.model and actor.lora"
            )
