"""The registry: group -> choice -> its schema, its factory in each domain, its free settings.

It is exact: a name that is not here is refused, there is no fallback. A run stores a choice by its
name (``GROUP.name``, set by its YAML), and is read back by it. To add a choice: a line here, a
schema if it has settings of its own, a YAML of that name in ``conf/GROUP``, and the factory.

Factories are named, not imported, so nothing here imports torch. All factories of a group take the
same arguments, written above the group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from klrl.base.errors import ConfigError
from klrl.base.imports import collection_paused
from klrl.config import sweep
from klrl.config.fields import ChoiceConfig
from klrl.config.schemas import control, language, learning, penalty, record, root

CONTROL, LANGUAGE = "control", "language"
#: The "domain" of a sweep's groups, which belong to no job.
SWEEP = "sweep"


@dataclass(frozen=True)
class Choice:
    """One choice of a group.

    Attributes:
        schema: its settings.
        factories: domain -> "module:factory"; other domains do not have the choice.
        free: settings that change no result, so that a job's identity leaves them out; ``*``: all.
        package: an optional package that it needs.
        remedy: what to do where the package is not installed.
    """

    schema: type[ChoiceConfig]
    factories: Mapping[str, str]
    free: tuple[str, ...] = ()
    package: str = ""
    remedy: str = ""

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that have the choice."""
        return tuple(self.factories)


def _both(factory: str) -> dict[str, str]:
    return {CONTROL: factory, LANGUAGE: factory}


def _each(factory: str) -> dict[str, str]:
    """The same name in the same file of both domains, as ``kl:legacy``."""
    return {domain: f"klrl.{domain}.{factory}" for domain in (CONTROL, LANGUAGE)}


def _control(factory: str) -> dict[str, str]:
    return {CONTROL: factory}


def _language(factory: str) -> dict[str, str]:
    return {LANGUAGE: factory}


def _sweep(schema: type[ChoiceConfig], factory: str, extra: str = "") -> Choice:
    """A choice of a sweep's group; the extra that it needs has the name of its package."""
    return Choice(schema, {SWEEP: factory}, (), extra, extra and f"pip install 'klrl[{extra}]'")


#: Groups of a job, in the order of ``--help``.
CHOICES: dict[str, dict[str, Choice]] = {
    # control: (config, *, seed, num_envs=None) -> EnvBase; language: (config, seed) -> Task
    "env": {
        "gym": Choice(control.EnvConfig, _control("klrl.control.env:gym")),
        "custom": Choice(control.CustomEnvConfig, _control("klrl.control.env:custom")),
        "sort_digits": Choice(
            language.SortDigitsConfig, _language("klrl.language.tasks:sort_digits")
        ),
        "instructions": Choice(
            language.InstructionsConfig, _language("klrl.language.tasks:instructions")
        ),
        "text": Choice(language.TextConfig, _language("klrl.language.tasks:text")),
    },
    # control: (config, env, *, normalize, separate) -> Agent; language: (job, *, chat) -> Policy
    "actor": {
        "mlp": Choice(control.GaussianActorConfig, _control("klrl.control.actor:fitting_agent")),
        "normal": Choice(control.GaussianActorConfig, _control("klrl.control.actor:normal_agent")),
        "tanh_normal": Choice(
            control.GaussianActorConfig, _control("klrl.control.actor:tanh_normal_agent")
        ),
        "categorical": Choice(
            control.ActorConfig, _control("klrl.control.actor:categorical_agent")
        ),
        "cnn": Choice(control.CNNActorConfig, _control("klrl.control.actor:fitting_agent")),
        "custom": Choice(control.CustomActorConfig, _control("klrl.control.own:custom_agent")),
        "causal_lm": Choice(language.CausalLMConfig, _language("klrl.language.policy:make_policy")),
    },
    # (config) -> ReferenceRule
    "reference": {
        "initial": Choice(penalty.ReferenceConfig, _both("klrl.kl.reference:initial")),
        "checkpoint": Choice(
            penalty.CheckpointReferenceConfig, _both("klrl.kl.reference:checkpoint")
        ),
        "ema": Choice(penalty.EMAReferenceConfig, _both("klrl.kl.reference:ema")),
        "periodic": Choice(penalty.PeriodicReferenceConfig, _both("klrl.kl.reference:periodic")),
        "adapter_off": Choice(penalty.ReferenceConfig, _language("klrl.kl.reference:adapter_off")),
    },
    # control: (config, actor, reference), language: (config) -> ReferenceKL | None
    "kl": {
        "none": Choice(penalty.KLConfig, _each("kl:no_kl")),
        "legacy": Choice(penalty.LegacyKLConfig, _each("kl:legacy")),
        "retrieve": Choice(penalty.RetrieveKLConfig, _each("kl:retrieve")),
    },
    # (config, coef, frames) -> a controller
    "controller": {
        "fixed": Choice(penalty.ControllerConfig, _both("klrl.kl.controllers:fixed")),
        "schedule": Choice(penalty.ScheduleControllerConfig, _both("klrl.kl.controllers:schedule")),
        "adaptive": Choice(penalty.AdaptiveControllerConfig, _both("klrl.kl.controllers:adaptive")),
        "dual": Choice(penalty.DualControllerConfig, _both("klrl.kl.controllers:dual")),
        "held": Choice(penalty.HeldControllerConfig, _both("klrl.kl.controllers:held")),
        "custom": Choice(penalty.CustomControllerConfig, _both("klrl.kl.controllers:custom")),
    },
    # control: (config, critic, reward_scale); language: (job, policy, kl) -> batch -> batch
    "advantage": {
        "gae": Choice(learning.AdvantageConfig, _each("advantage:gae")),
        "custom": Choice(learning.CustomAdvantageConfig, _control("klrl.control.advantage:custom")),
        "group": Choice(learning.GroupConfig, _language("klrl.language.advantage:group")),
    },
    # (config, reference_estimator, divergence, reward_scale) -> PolicyLoss
    "loss": {
        "klpen": Choice(learning.KLPENConfig, _both("klrl.losses.policy:KLPENLoss")),
        "klpen_held": Choice(learning.KLPENConfig, _both("klrl.losses.policy:KLPENLoss")),
        "clip": Choice(learning.ClipConfig, _both("klrl.losses.policy:ClipLoss")),
        "custom": Choice(learning.CustomLossConfig, _both("klrl.losses.own:custom")),
    },
    # (job, the domain's steps) -> a learner
    "learner": {
        "ppo": Choice(learning.LearnerConfig, _both("klrl.train.learner:Learner")),
    },
    # (config, parameters) -> the optimiser
    "optim": {
        "adam": Choice(
            learning.OptimConfig,
            {CONTROL: "klrl.control.step:adam", LANGUAGE: "klrl.language.update:adam"},
        ),
        "adamw": Choice(
            learning.AdamWConfig,
            {CONTROL: "klrl.control.step:adamw", LANGUAGE: "klrl.language.update:adamw"},
        ),
    },
    # control: (Asked) -> Rollout; language: (the parts of a language run) -> Rollout
    "collector": {
        "vector": Choice(control.CollectorConfig, _control("klrl.control.rollout:vector_rollout")),
        "torchrl": Choice(
            control.CollectorConfig, _control("klrl.control.rollout:torchrl_rollout")
        ),
        "ray": Choice(
            control.RayCollectorConfig,
            _control("klrl.control.ray_rollout:ray_rollout"),
            free=("cpus_timeout",),
            package="ray",
            remedy="pip install 'klrl[ray]', or choose collector=vector",
        ),
        "sampler": Choice(
            language.SamplerConfig,
            _language("klrl.language.rollout:PromptRollout"),
            free=("samples_every", "samples_count"),
        ),
    },
    # (config, opened) -> a context manager that yields loggers
    "logger": {
        "wandb": Choice(
            record.WandbConfig,
            _both("klrl.runs.wandb_logger:wandb_run"),
            free=("*",),
            package="wandb",
            remedy="pip install wandb, or choose logger=none",
        ),
        "tensorboard": Choice(
            record.LoggerConfig,
            _both("klrl.runs.loggers:tensorboard_run"),
            free=("*",),
            package="tensorboard",
            remedy="pip install 'klrl[tensorboard]', or choose logger=csv",
        ),
        "csv": Choice(record.LoggerConfig, _both("klrl.runs.loggers:csv_run"), free=("*",)),
        "custom": Choice(
            record.CustomLoggerConfig, _both("klrl.runs.own_logger:custom_run"), free=("*",)
        ),
        "none": Choice(record.LoggerConfig, _both("klrl.runs.loggers:no_run"), free=("*",)),
    },
}

#: Groups of a sweep; no job reads them.
SWEEP_CHOICES: dict[str, dict[str, Choice]] = {
    # (config, jobs, folder) -> outcomes, and that jobs are in a queue
    "launcher": {
        "local": _sweep(sweep.LauncherConfig, "klrl.sweep.launchers:local"),
        "joblib": _sweep(sweep.JoblibConfig, "klrl.sweep.launchers:joblib", "joblib"),
        "submitit": _sweep(sweep.SubmititConfig, "klrl.sweep.queue:submitit", "submitit"),
        "ray": _sweep(sweep.RayLauncherConfig, "klrl.sweep.cluster:ray", "ray"),
    },
    # (sweep, config, launcher, overrides, args) -> exit code
    "search": {
        "grid": _sweep(sweep.SearchConfig, "klrl.sweep.run:run_grid"),
        "optuna": _sweep(sweep.OptunaConfig, "klrl.sweep.search:run_search", "optuna"),
    },
}

GROUPS = tuple(CHOICES)
SWEEP_GROUPS = tuple(SWEEP_CHOICES)
ALL_CHOICES = CHOICES | SWEEP_CHOICES

#: The setting that holds a choice's name, in every group.
NAME = "name"


def choice_of(group: str, name: str) -> Choice:
    """The registry's entry of a choice.

    Raises:
        ConfigError: the choice is not registered.
    """
    known = ALL_CHOICES[group]
    if name not in known:
        raise ConfigError(
            f"{group}.{NAME}={name}: is not registered; klrl/config/choices.py has "
            f"{', '.join(known)}"
        )
    return known[name]


def factory(group: str, config: ChoiceConfig, domain: str) -> Callable[..., Any]:
    """The function (or class) that makes the chosen part in a domain.

    Args:
        group: as ``controller``.
        config: the group's settings, with the name of the choice.
        domain: control, language, or sweep for a sweep's groups.

    Raises:
        ConfigError: the choice is not registered, or not for this domain.
    """
    choice = choice_of(group, config.name)
    if domain not in choice.factories:
        raise ConfigError(
            f"{group}={config.name}: {domain} has no such choice; choose one of "
            f"{', '.join(choices_for(group, domain))}"
        )
    return resolve(choice.factories[domain])


def resolve(path: str) -> Callable[..., Any]:
    """Import the object at ``module:name``."""
    module, _, name = path.partition(":")
    with collection_paused():
        return getattr(importlib.import_module(module), name)


def choices_for(group: str, domain: str) -> list[str]:
    """The names of a domain's choices in a group."""
    return [name for name, choice in ALL_CHOICES[group].items() if domain in choice.factories]


@cache
def register_schemas() -> None:
    """Register the dataclasses with Hydra, once, in the group ``schema``: they are no choices."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=root.RootConfig)
    store.store(group="schema", name="sweep", node=sweep.SweepRoot)
    for group, choices in ALL_CHOICES.items():
        for name, choice in choices.items():
            store.store(group=f"schema/{group}", name=name, node=choice.schema)


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
