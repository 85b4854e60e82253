"""The registry: group -> choice -> its schema, its factory in each domain, its free settings.

It is exact: a name that is not here is refused, there is no fallback. A run stores a choice by its
name (``GROUP.name``, set by its YAML), and is read back by it. To add a choice: a line here
and the factory; with settings or values of its own also a schema and a YAML in ``conf/GROUP``, else
``like`` names the choice whose values it starts from.

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
    """One choice of a group, in the domains that have a factory for it."""

    schema: type[ChoiceConfig]
    factories: Mapping[str, str]  # domain -> "module:factory"
    #: Settings that change no result, so that a job's identity leaves them out; ``*``: all.
    free: tuple[str, ...] = ()
    #: An optional package that it needs, and what to do where that is not installed.
    package: str = ""
    remedy: str = ""
    #: A choice of the same schema whose values it starts from; then it needs no YAML of its own.
    like: str = ""

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that have the choice."""
        return tuple(self.factories)


def _control(schema: type[ChoiceConfig], factory: str, **more: Any) -> Choice:
    return Choice(schema, {CONTROL: f"klrl.control.{factory}"}, **more)


def _language(schema: type[ChoiceConfig], factory: str, **more: Any) -> Choice:
    return Choice(schema, {LANGUAGE: f"klrl.language.{factory}"}, **more)


def _both(schema: type[ChoiceConfig], factory: str, **more: Any) -> Choice:
    """One factory serves both domains."""
    return Choice(schema, dict.fromkeys((CONTROL, LANGUAGE), f"klrl.{factory}"), **more)


def _each(schema: type[ChoiceConfig], factory: str) -> Choice:
    """The same name in the same file of both domains, as ``kl:legacy``."""
    return Choice(
        schema, {CONTROL: f"klrl.control.{factory}", LANGUAGE: f"klrl.language.run.{factory}"}
    )


def _sweep(schema: type[ChoiceConfig], factory: str, extra: str = "") -> Choice:
    """A choice of a sweep's group; the extra that it needs has the name of its package."""
    return Choice(schema, {SWEEP: factory}, (), extra, extra and f"pip install 'klrl[{extra}]'")


#: Groups of a job, in the order of ``--help``.
CHOICES: dict[str, dict[str, Choice]] = {
    # control: (config, *, seed, num_envs=None) -> EnvBase; language: (config, seed) -> Task
    "env": {
        "gym": _control(control.EnvConfig, "env:gym"),
        "custom": _control(control.CustomEnvConfig, "env:custom"),
        "sort_digits": _language(language.SortDigitsConfig, "data.tasks:sort_digits"),
        "instructions": _language(language.InstructionsConfig, "data.tasks:instructions"),
        "text": _language(language.TextConfig, "data.tasks:text"),
    },
    # control: (config, env, *, normalize, separate) -> Agent; language: (job, *, chat) -> Policy
    "actor": {
        "mlp": _control(control.GaussianActorConfig, "actor:fitting_agent"),
        "normal": _control(control.GaussianActorConfig, "actor:normal_agent"),
        "tanh_normal": _control(control.GaussianActorConfig, "actor:tanh_normal_agent"),
        "categorical": _control(control.ActorConfig, "actor:categorical_agent"),
        "cnn": _control(control.CNNActorConfig, "actor:fitting_agent"),
        "custom": _control(control.CustomActorConfig, "own:custom_agent"),
        "causal_lm": _language(language.CausalLMConfig, "run.policy:make_policy"),
    },
    # (config) -> ReferenceRule
    "reference": {
        "initial": _both(penalty.ReferenceConfig, "kl.reference:initial"),
        "checkpoint": _both(penalty.CheckpointReferenceConfig, "kl.reference:checkpoint"),
        "ema": _both(penalty.EMAReferenceConfig, "kl.reference:ema"),
        "periodic": _both(penalty.PeriodicReferenceConfig, "kl.reference:periodic"),
        "adapter_off": Choice(penalty.ReferenceConfig, {LANGUAGE: "klrl.kl.reference:adapter_off"}),
    },
    # control: (config, actor, reference), language: (config) -> ReferenceKL | None
    "kl": {
        "none": _each(penalty.KLConfig, "kl:no_kl"),
        "legacy": _each(penalty.LegacyKLConfig, "kl:legacy"),
        "retrieve": _each(penalty.RetrieveKLConfig, "kl:retrieve"),
    },
    # (config, coef, frames) -> a controller
    "controller": {
        "fixed": _both(penalty.ControllerConfig, "kl.controllers:fixed"),
        "schedule": _both(penalty.ScheduleControllerConfig, "kl.controllers:schedule"),
        "adaptive": _both(penalty.AdaptiveControllerConfig, "kl.controllers:adaptive"),
        "dual": _both(penalty.DualControllerConfig, "kl.controllers:dual"),
        "held": _both(penalty.HeldControllerConfig, "kl.controllers:held"),
        "custom": _both(penalty.CustomControllerConfig, "kl.controllers:custom"),
    },
    # control: (config, critic, reward_scale); language: (job, policy, kl) -> batch -> batch
    "advantage": {
        "gae": _each(learning.AdvantageConfig, "advantage:gae"),
        "custom": _control(learning.CustomAdvantageConfig, "advantage:custom"),
        "group": _language(learning.GroupConfig, "run.advantage:group"),
    },
    # (config, reference_estimator, divergence, reward_scale) -> PolicyLoss
    "loss": {
        "klpen": _both(learning.KLPENConfig, "losses.policy:KLPENLoss"),
        "klpen_held": _both(learning.KLPENConfig, "losses.policy:KLPENLoss"),
        "clip": _both(learning.ClipConfig, "losses.policy:ClipLoss"),
        "custom": _both(learning.CustomLossConfig, "losses.own:custom"),
    },
    # (job, the domain's steps) -> a learner
    "learner": {
        "ppo": _both(learning.LearnerConfig, "train.learner:Learner"),
    },
    # (config, parameters) -> the optimiser
    "optim": {
        "adam": Choice(
            learning.OptimConfig,
            {CONTROL: "klrl.control.step:adam", LANGUAGE: "klrl.language.run.update:adam"},
        ),
        "adamw": Choice(
            learning.AdamWConfig,
            {CONTROL: "klrl.control.step:adamw", LANGUAGE: "klrl.language.run.update:adamw"},
        ),
    },
    # control: (Asked) -> Rollout; language: (the parts of a language run) -> Rollout
    "collector": {
        "vector": _control(control.CollectorConfig, "rollout:vector_rollout"),
        "torchrl": _control(control.CollectorConfig, "rollout:torchrl_rollout"),
        "ray": _control(
            control.RayCollectorConfig,
            "ray_rollout:ray_rollout",
            free=("cpus_timeout",),
            package="ray",
            remedy="pip install 'klrl[ray]', or choose collector=vector",
        ),
        "sampler": _language(
            language.SamplerConfig,
            "run.rollout:PromptRollout",
            free=("samples_every", "samples_count"),
        ),
    },
    # (config, opened) -> a context manager that yields loggers
    "logger": {
        "wandb": _both(
            record.WandbConfig,
            "runs.wandb_logger:wandb_run",
            free=("*",),
            package="wandb",
            remedy="pip install wandb, or choose logger=none",
        ),
        "tensorboard": _both(
            record.LoggerConfig,
            "runs.loggers:tensorboard_run",
            free=("*",),
            package="tensorboard",
            remedy="pip install 'klrl[tensorboard]', or choose logger=csv",
        ),
        "csv": _both(record.LoggerConfig, "runs.loggers:csv_run", free=("*",)),
        "custom": _both(record.CustomLoggerConfig, "runs.own_logger:custom_run", free=("*",)),
        "none": _both(record.LoggerConfig, "runs.loggers:no_run", free=("*",)),
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
    # (sweep, config, launcher, args) -> exit code
    "search": {
        "grid": _sweep(sweep.SearchConfig, "klrl.sweep.run:run_grid"),
        "optuna": _sweep(sweep.OptunaConfig, "klrl.sweep.search:run_search", "optuna"),
    },
}

GROUPS = tuple(CHOICES)
SWEEP_GROUPS = tuple(SWEEP_CHOICES)
ALL_CHOICES = CHOICES | SWEEP_CHOICES
#: In the order of the help; ``experiment`` is a preset over the others.
ALL_GROUPS = (*GROUPS, "experiment", *SWEEP_GROUPS)

#: The setting that holds a choice's name, in every group.
NAME = "name"
#: Settings that klrl finds out, and no user gives.
FOUND_OUT = frozenset((NAME, "source", "sources", "version"))


def choice_of(group: str, name: str) -> Choice:
    """The registry's entry of a choice."""
    known = ALL_CHOICES[group]
    if name not in known:
        raise ConfigError(
            f"{group}.{NAME}={name}: is not registered; klrl/config/choices.py has "
            f"{', '.join(known)}"
        )
    return known[name]


def factory(group: str, config: ChoiceConfig, domain: str) -> Callable[..., Any]:
    """What makes the chosen part in a domain; that of a sweep's groups is :data:`SWEEP`."""
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
    try:
        with collection_paused():
            found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if found is None:
        raise ConfigError(f"{path}: klrl/config/choices.py names it, and it is not there; add it")
    return found


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
            if choice.like:
                values = {"defaults": [choice.like, "_self_"], NAME: name}
                store.store(group=group, name=name, node=values)


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else next to it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
