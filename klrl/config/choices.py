"""The registry of choices. A choice has a schema of settings, and a factory for each domain.

Unregistered names are refused. A run stores the names of its choices (``GROUP.name``), and a resume
reads them. To add a choice, write its factory and, in ``schemas/``, a class of its settings with
the decorator :func:`registered`. Schemas of a sweep are in ``sweep.py``.

The registry stores factories by name, so that this file does not import torch. The comments in
:data:`CHOICES` list the arguments of the factories.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from klrl.base.errors import ConfigError
from klrl.base.imports import collection_paused
from klrl.config.fields import ChoiceConfig

CONTROL, LANGUAGE = "control", "language"
#: The "domain" of the groups ``launcher`` and ``search``, which belong to no job.
SWEEP = "sweep"


@dataclass(frozen=True)
class Choice:
    """One choice of a group, with a factory for each domain that has it."""

    schema: type[ChoiceConfig]
    factories: Mapping[str, str]  # domain -> "module:factory"
    what: str = ""  # the choice's line in ``--help``
    #: Setting -> its default value, if that differs from the schema's.
    values: Mapping[str, object] = field(default_factory=dict)
    #: Settings that change no result, so a job's identity omits them; ``*`` means all settings.
    free: tuple[str, ...] = ()
    #: An optional package that the choice needs, and the remedy if it is missing.
    package: str = ""
    remedy: str = ""

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that have the choice."""
        return tuple(self.factories)


#: Groups of a job, in the order of ``--help``, with the signatures of their factories: ``config``
#: contains the settings of the group, and ``job`` all settings.
CHOICES: dict[str, dict[str, Choice]] = {
    # control: (config, *, seed, num_envs=None) -> EnvBase; language: (config, seed) -> Task
    "env": {},
    # control: (config, env, *, normalize, separate, mixed) -> Agent;
    # language: (job, *, chat, say) -> Policy
    "actor": {},
    # (config) -> ReferenceRule
    "reference": {},
    # control: (config, actor, reference), language: (config) -> ReferenceKL | None
    "kl": {},
    # a subclass of FixedKLController, with a classmethod ``of(config, coef, frames)``
    "controller": {},
    # control: (config, critic, reward_scale, normalizer), language: (job, policy, kl) ->
    # a function that writes the advantage into a batch
    "advantage": {},
    # (config, reference_estimator, divergence, reward_scale=1) -> PolicyLoss
    "loss": {},
    # (job, steps: an object that makes gradient steps in the domain) -> Learner
    "learner": {},
    # (config, parameters) -> an optimiser
    "optim": {},
    # control: (env, agent, steps, device) -> Rollout; demonstrations: (job, agent, env) -> data;
    # language: (job, policy, sampler, task, prompts, iteration) -> Rollout
    "collector": {},
    # (config, logged run) -> a context manager that yields loggers
    "logger": {},
}

#: Groups of a sweep, which no job reads.
SWEEP_CHOICES: dict[str, dict[str, Choice]] = {
    # (config, jobs, folder) -> an iterator of outcomes, queued jobs and notices
    "launcher": {},
    # (sweep, config, launcher, args) -> exit code
    "search": {},
}

GROUPS = tuple(CHOICES)
SWEEP_GROUPS = tuple(SWEEP_CHOICES)
ALL_CHOICES = CHOICES | SWEEP_CHOICES
#: All groups in the order of ``--help``; an ``experiment`` changes settings of other groups.
ALL_GROUPS = (*GROUPS, "experiment", *SWEEP_GROUPS)

#: The setting, in every group, that contains the name of the choice.
NAME = "name"
#: Settings that klrl sets, and users cannot set.
SET_BY_KLRL = frozenset((NAME, "source", "sources", "version"))


Schema = TypeVar("Schema", bound=type[ChoiceConfig])


@dataclass_transform(field_specifiers=(field,))
def registered(
    group: str, name: str, what: str = "", *, both: str = "", **more: Any
) -> Callable[[Schema], Schema]:
    """Make a class of settings a dataclass, and register it as the schema of a choice.

    ``what`` is the choice's line in ``--help``, by default the first line of the docstring.
    ``both`` is the factory for both domains, as ``module:function`` relative to klrl. Otherwise the
    keywords ``control``, ``language`` and ``sweep`` in ``more`` name a factory for each domain.
    Other keywords are fields of :class:`Choice`.
    """

    def register(schema: Schema) -> Schema:
        if "__dataclass_fields__" not in vars(schema):
            dataclass(schema)  # changes the class in place
        paths = dict.fromkeys((CONTROL, LANGUAGE), both) if both else {}
        paths |= {each: more.pop(each) for each in (CONTROL, LANGUAGE, SWEEP) if each in more}
        factories = {domain: f"klrl.{path}" for domain, path in paths.items()}
        said = (schema.__doc__ or "").partition("\n")[0].removesuffix(".")
        said = said if said[1:2].isupper() else said[:1].lower() + said[1:]
        more.setdefault("remedy", f"pip install 'klrl[{more.get('package')}]'")
        if name in ALL_CHOICES.get(group, (name,)):  # the group is unknown, or the name is taken
            raise ConfigError(
                f"@registered({group!r}, {name!r}) of {schema.__name__}: give an unused name in "
                f"one of the groups {', '.join(ALL_CHOICES)}"
            )
        ALL_CHOICES[group][name] = Choice(schema, factories, what or said, **more)
        return schema

    return register


def choice_of(group: str, name: str) -> Choice:
    """Return the entry of a choice in the registry."""
    known = ALL_CHOICES[group]
    if name not in known:
        raise ConfigError(
            f"{group}.{NAME}={name}: is not registered; klrl/config/schemas has {', '.join(known)}"
        )
    return known[name]


def factory(group: str, config: ChoiceConfig, domain: str) -> Callable[..., Any]:
    """Import the factory of a choice in a domain, which is :data:`SWEEP` for groups of a sweep."""
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
            found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if found is None:
        file = module.replace(".", "/") + ".py"
        raise ConfigError(f"{file}: has no {name}, which klrl/config names; add it")
    return found


def choices_for(group: str, domain: str) -> list[str]:
    """List the names of a group's choices in a domain."""
    return [name for name, choice in ALL_CHOICES[group].items() if domain in choice.factories]


def conf_dir() -> Path:
    """Return the folder ``conf``: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
