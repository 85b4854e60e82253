"""Makes a checked job with typed settings of plain values, or raises a one-line error.

A schema declares types and ranges, which pydantic checks. ``rules/`` checks settings against each
other, and ``rules/unread.py`` refuses settings that a job never reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from klrl.base.errors import ConfigError
from klrl.config import (
    ALL_CHOICES,
    GROUPS,
    JOBS,
    LANGUAGE,
    ChoiceConfig,
    EnvConfig,
    JobConfig,
    Ungrouped,
    choice_of,
    choices_for,
)
from klrl.config.choices import NAME
from klrl.config.rules import rules_of

Schema = TypeVar("Schema")


class NoValueError(ConfigError):
    """A setting that the user must give has no value."""


class UnknownSettingError(ConfigError):
    """The config has a setting that its schema lacks; ``key`` is the setting."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: no such setting; drop it")
        self.key = key


def to_config(cfg: DictConfig) -> JobConfig:
    """Convert a config composed by Hydra to a checked job, as :func:`checked` does."""
    data, read = cfg.get("data"), "${data}" in str(OmegaConf.to_container(cfg, resolve=False))
    if read and not data:
        raise NoValueError("data: has no value; give demonstrations or answers, as in data=PATH")
    if data is not None and not read:
        remedy = "start from experiment=clone or experiment=sft, or drop it"
        remedy += f" (prompts: experiment=text env.data={data})"
        raise ConfigError(f"data={data}: no chosen group reads it; {remedy}")
    return checked(plain(cfg))


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the values of a composed config, with its interpolations resolved."""
    return {str(key): each for key, each in OmegaConf.to_container(cfg, resolve=True).items()}  # type: ignore[union-attr]


def checked(settings: Mapping[str, Any]) -> JobConfig:
    """Make a checked job of plain values; its ``env`` determines the domain.

    Raises:
        NoValueError: a value is missing.
        UnknownSettingError: a setting is not in the schema.
    """
    check_plain("", settings)
    parts: dict[str, Any] = {**to_settings(settings, GROUPS)}
    rest = {key: each for key, each in settings.items() if key not in (*GROUPS, "experiment")}
    ungrouped = validated("", Ungrouped, rest)
    for name in _UNGROUPED:
        parts[name] = getattr(ungrouped, name)
    config = JOBS[_domain(parts)](**parts)
    for check in rules_of(config.domain):
        check(config)
    check_device_name(config.device)
    return config


#: Settings of a job outside any group.
_UNGROUPED = ("frames", "seed", "device", "threads", "rank_timeout", "eval", "checkpoint")


#: A language env -> an experiment that uses it.
_EXPERIMENT = {"sort_digits": "sort_digits", "instructions": "smollm", "text": "text"}


def _domain(parts: Mapping[str, ChoiceConfig]) -> str:
    """Return the domain of the chosen ``env``; refuse other choices that this domain lacks."""
    env = parts["env"]
    (domain,) = choice_of("env", env.name).domains
    for group in GROUPS:
        name = parts[group].name
        if domain in choice_of(group, name).domains:
            continue
        fitting = " or ".join(f"{group}={choice}" for choice in choices_for(group, domain))
        task = env.named if isinstance(env, EnvConfig) else f"env={env.name}"
        larger = f", or start from experiment={_EXPERIMENT[env.name]}" if domain == LANGUAGE else ""
        raise ConfigError(f"{group}={name}: {task} is a {domain} task; choose {fitting}{larger}")
    for group, base in get_type_hints(JOBS[domain]).items():
        if group in GROUPS and not isinstance(parts[group], base):
            raise ConfigError(
                f"{group}={parts[group].name}: its schema {type(parts[group]).__name__} lacks "
                f"settings that every {group} has; derive it from {getattr(base, '__name__', base)}"
            )
    return domain


def to_settings(settings: Mapping[str, Any], groups: Iterable[str]) -> dict[str, ChoiceConfig]:
    """Make the schemas of ``groups`` of plain values, each that of the choice it names."""
    return {group: _choice(group, settings.get(group)) for group in groups}


def _choice(group: str, node: object) -> ChoiceConfig:
    if node is None:
        raise ConfigError(f"{group}: nothing is chosen; choose one, as in {group}=...")
    if not isinstance(node, Mapping) or NAME not in node:
        raise ConfigError(
            f"{group}: its settings name no choice; in a YAML of your own put NAME@_here_ first in "
            f"the defaults list, or NAME@{group} if the YAML is @package _global_; NAME is one of "
            f"{', '.join(ALL_CHOICES[group])}"
        )
    return validated(f"{group}.", choice_of(group, str(node[NAME])).schema, node)


def typed_choice(group: str, settings: object) -> Any:
    """Make a group's schema of the settings in a manifest."""
    node = settings.get(group) if isinstance(settings, Mapping) else None
    check_plain(f"{group}: its stored settings", node)
    try:
        return _choice(group, node)
    except UnknownSettingError as error:
        raise ConfigError(f"its stored settings are broken: {error}") from error


_adapter = cache(TypeAdapter)  # building one takes milliseconds


def validated(path: str, schema: type[Schema], values: Mapping[str, Any]) -> Schema:
    """Make a schema of plain values; ``path`` precedes its keys in messages."""
    for name, value in values.items():
        if value == MISSING:
            raise NoValueError(f"{path}{name}: has no value; give one, as in {path}{name}=...")
    try:
        made: Schema = _adapter(schema).validate_python(values)  # type: ignore[arg-type]
        return made
    except ValidationError as error:
        raise refusal(path, error.errors()[0]) from error


#: Type of a pydantic error, or its first word -> the remedy.
REMEDIES = {
    "float": "give a number",
    "finite": "give a finite number",
    "int": "give a whole number",
    "bool": "give true or false",
    "list": "give a list, as in {key}=[{value}]",
    "dict": "give a dictionary, as in '{key}={{name: value}}'",
    "dataclass": "give its settings, as {key}.target=package.module:Name of a custom part",
    "string_type": "give one text",
    "greater_than": "give a number > {gt}",
    "greater_than_equal": "give a number >= {ge}",
    "less_than": "give a number < {lt}",
    "less_than_equal": "give a number <= {le}",
    "literal": "choose {expected}",
    "value": "{error}",
}


def refusal(path: str, error: ErrorDetails) -> ConfigError:
    """Make the one-line error for a value that pydantic refuses."""
    inner = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in error["loc"])
    key, kind, value = path + inner.removeprefix("."), error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        return UnknownSettingError(key)
    remedy = REMEDIES.get(kind, REMEDIES.get(kind.partition("_")[0], ""))
    told = remedy.format(key=key, value=value, **error.get("ctx", {}))
    return ConfigError(f"{key}={value!s:.99}: {told or error['msg'].removeprefix('Input ')}")


def check_device_name(device: str) -> None:
    """Refuse an unknown device name."""
    if not re.fullmatch(r"auto|cpu|cuda(:0|:[1-9]\d*)?", str(device), re.ASCII):
        raise ConfigError(
            f"device={device}: choose auto, cpu, cuda, or one of several GPUs, such as cuda:1"
        )


def check_plain(where: str, value: object) -> None:
    """Refuse settings that still contain an interpolation, such as ``${oc.env:HOME}``."""
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{where}: {value:.80} is an interpolation; write its value instead")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_plain(where, each)
