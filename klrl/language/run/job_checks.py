"""Checks the settings of a language job, or of an evaluation on a different task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.config import JobConfig, LanguageConfig
from klrl.config.compose import Composer
from klrl.config.given import quoted
from klrl.config.overrides import parse
from klrl.runs.find import other_runs
from klrl.runs.machine import check_language_packages
from klrl.runs.resume import allowed, stored_config, warn_edited

#: Settings of the task that an evaluation may change, if the task has them. In addition,
#: ``actor.model`` may give the current folder of the base model.
_CHANGEABLE = (
    *("env.reward", "env.shortest", "env.longest"),
    *("env.reward_weights", "env.eval_data", "env.eval_split"),
)


def check_job(config: LanguageConfig, overridden: frozenset[str], *, resumed: bool) -> None:
    """Refuse a job if a package, its data, a reward function or a run that it loads is missing.

    Also refuse a file as ``actor.model``, and an ``actor.init`` with a different network. The
    arguments are those of :func:`klrl.runs.machine.check_machine`.
    """
    check_language_packages(config)
    # These modules import torch, and the packages whose presence was just checked.
    from klrl.language.data.tasks import make_task
    from klrl.language.model import smollm
    from klrl.language.run.load import language_config

    make_task(config.env, config.seed)
    model = config.actor.model
    if model == smollm.NAME:
        smollm.check_installed()
    if model is not None and expanded(model).is_file():
        raise ConfigError(f"actor.model={model}: is a file; give the model's folder")
    if resumed:
        return
    for setting, path, run in other_runs(config):
        warn_edited(setting, path, run)
        actor = language_config(run, setting).actor
        same = (actor.model, actor.lora) == (config.actor.model, config.actor.lora)
        if setting == "actor.init" and not same:
            raise ConfigError(
                f"{setting}={path}: its network is actor.model={actor.model} with "
                f"actor.lora.r={actor.lora.r}; give the same actor.model and actor.lora here"
            )


def job_of_model(model: str | Path, words: Sequence[str]) -> JobConfig:
    """Return the job in which a model's folder answers the prompts ``env.data`` in ``words``."""
    keys = ("env.data", "env.split", "env.template_kwargs", "actor.dtype")
    given = allowed(words, (*keys, "collector.max_new_tokens", "collector.temperature"))
    if "env.data" not in [each.key for each in given]:
        raise ConfigError(f"{model}: a model has no prompts; give --prompts FILE (env.data=FILE)")
    job = ("experiment=text", "kl=none", "env.reward=exact", f"actor.model={model}")
    config = Composer().job_config([*parse(map(quoted, job)), *given])
    assert isinstance(config, LanguageConfig)
    check_language_packages(config)
    config.env.reward = []  # a divergence reads no score, and the rows need no answer
    return config


def language_on_task(run: Path, stored: LanguageConfig, overrides: Sequence[str]) -> JobConfig:
    """Implement :func:`klrl.runs.resume.config_on_task` for language runs."""
    changeable = [name for name in _CHANGEABLE if hasattr(stored.env, name.partition(".")[2])]
    changeable.append("actor.model")
    return stored_config(run, allowed(overrides, changeable), changeable=changeable)
