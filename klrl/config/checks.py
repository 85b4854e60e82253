"""Converts a composed config to a checked job with typed settings, or raises a one-line error.

A schema declares the range of each setting. ``rules/`` checks settings against each other, and
``rules/unread.py`` refuses settings that a job never reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from operator import ge, gt, le
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, first_line
from klrl.config import (
    GROUPS,
    JOBS,
    LANGUAGE,
    CheckpointConfig,
    ChoiceConfig,
    EnvConfig,
    EvalConfig,
    JobConfig,
    OwnPart,
    RootConfig,
    choice_of,
    choices_for,
)
from klrl.config.choices import ALL_CHOICES, CHOICES, NAME
from klrl.config.rules import rules_of


class NoValueError(ConfigError):
    """A setting that the user must give has no value."""


class UnknownSettingError(ConfigError):
    """The config has a setting that its schema lacks; ``key`` is the setting."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: no such setting; drop it")
        self.key = key


def to_config(cfg: DictConfig) -> JobConfig:
    """Convert a config composed by Hydra to a checked job; its ``env`` determines the domain.

    Raises:
        NoValueError: a value is missing.
        UnknownSettingError: a setting is not in the schema.
    """
    extra = sorted(set(map(str, cfg)) - {f.name for f in fields(RootConfig)} - {"experiment"})
    if extra:
        raise UnknownSettingError(extra[0])
    _check_data(cfg)
    parts: dict[str, Any] = {**to_settings(cfg, GROUPS)}
    for name in ("eval", "checkpoint"):
        parts[name] = _object(name, cfg[name])
    for name in _UNGROUPED:
        if OmegaConf.is_missing(cfg, name):
            raise NoValueError(f"{name}: has no value; give one, as in {name}=...")
        parts[name] = checked_value(name, cfg.get(name), _ROOT[name].metadata)
    config = JOBS[_domain(parts)](**parts)
    check_plain(f"env={config.env.name}", asdict(config))
    for check in rules_of(config.domain):
        check(config)
    check_device_name(config.device)
    return config


def _check_data(cfg: DictConfig) -> None:
    """Require a value of ``data`` if a group refers to ``${data}``; else refuse a value."""
    data, read = cfg.get("data"), "${data}" in str(OmegaConf.to_container(cfg, resolve=False))
    if read and not data:
        raise NoValueError("data: has no value; give demonstrations or answers, as in data=PATH")
    if data is not None and not read:
        remedy = "start from experiment=clone or experiment=sft, or drop it"
        remedy += f" (prompts: experiment=text env.data={data})"
        raise ConfigError(f"data={data}: no chosen group reads it; {remedy}")


_ROOT = {f.name: f for f in fields(RootConfig)}
#: Settings of a job outside any group, except ``eval`` and ``checkpoint``.
_UNGROUPED = ("frames", "seed", "device", "threads")


def check_config(config: JobConfig) -> JobConfig:
    """Check a job that was made or changed in Python, and return it with converted values."""
    schemas: dict[str, type] = dict.fromkeys(GROUPS, ChoiceConfig)
    schemas |= {"eval": EvalConfig, "checkpoint": CheckpointConfig}
    for name, schema in schemas.items():
        value = getattr(config, name)
        if not isinstance(value, schema):
            some = "an instance of one of klrl.config's settings classes"
            one = some if name in GROUPS else f"a klrl.config.{schema.__name__}"
            raise ConfigError(f"{name}={value!r}: give {one}")
    check_plain(f"env={config.env.name}", asdict(config))
    cfg = OmegaConf.structured(RootConfig)
    for name in (*schemas, *_UNGROUPED):
        value = getattr(config, name)
        try:
            cfg[name] = OmegaConf.structured(value) if name in schemas else value
        except OmegaConfBaseException as error:
            below = f".{error.full_key}" if error.full_key else ""
            key = name + (below if name in schemas else f"={value!r}")
            raise ConfigError(f"{key}: {first_line(error)}") from error
    checked = to_config(cfg)
    if type(checked) is not type(config):
        raise ConfigError(
            f"env={config.env.name}: belongs to {checked.domain}, not to a {type(config).__name__}"
        )
    return checked


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


def to_settings(cfg: DictConfig, groups: Iterable[str]) -> dict[str, ChoiceConfig]:
    """Convert ``groups`` of a composed config to instances of their schemas; check the values."""
    parts = {group: _object(group, _group_node(cfg, group)) for group in groups}
    for group, value in parts.items():
        schema = choice_of(group, value.name).schema
        if type(value) is not schema:
            raise ConfigError(
                f"{group}.{NAME}={value.name}: its settings are those of {type(value).__name__}, "
                f"not {schema.__name__}; put {value.name}@_here_ first in its YAML's defaults "
                f"list, or {value.name}@{group} if the YAML is @package _global_"
            )
    return parts


def typed_choice(group: str, settings: object) -> Any:
    """Convert a group's settings from a manifest to an instance of their schema, and check them."""
    node = settings.get(group) if isinstance(settings, Mapping) else None
    check_plain(f"{group}: its stored settings", node)
    cfg = OmegaConf.structured(RootConfig)
    try:
        cfg[group] = typed_group(group, node)
        return to_settings(cfg, [group])[group]
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{group}: its stored settings are broken: {first_line(error)}"
        ) from error


def _group_node(cfg: DictConfig, group: str) -> DictConfig:
    node = cfg.get(group)
    if node is None:
        raise ConfigError(f"{group}: nothing is chosen; choose one, as in {group}=...")
    if not OmegaConf.is_dict(node) or OmegaConf.get_type(node) is dict:
        known = ", ".join(ALL_CHOICES[group])
        raise ConfigError(
            f"{group}: the chosen YAML extends no choice of klrl; put NAME@_here_ first in its "
            f"defaults list, or NAME@{group} if the YAML is @package _global_; NAME is one of "
            f"{known}"
        )
    return node


def _object(path: str, node: DictConfig) -> Any:
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise NoValueError(f"{missing[0]}: has no value; give one, as in {missing[0]}=...")
    schema = OmegaConf.get_type(node)
    assert schema is not None
    extra = sorted(set(map(str, node)) - {f.name for f in fields(schema)})
    if extra:
        raise UnknownSettingError(f"{path}.{extra[0]}")
    value: Any = OmegaConf.to_object(node)
    _check_fields(path, value)
    return value


def _check_fields(path: str, value: Any) -> None:
    """Check each field of a schema and of its nested schemas; set converted values in place."""
    for f in fields(value):
        key, setting = f"{path}.{f.name}", getattr(value, f.name)
        if str(f.type).startswith("list") and not isinstance(setting, list):
            # The value of an interpolation such as ${kl} may have any type.
            raise ConfigError(f"{key}={setting}: give a list")
        if f.metadata.get("own") and isinstance(setting, list):
            home = f.metadata.get("home", "")
            named = ["" if each is None else each for each in setting]
            parts = [_own_part(f"{key}[{i}]", each, home) for i, each in enumerate(named)]
            setattr(value, f.name, parts)
        elif f.metadata.get("own"):
            setattr(value, f.name, _own_part(key, setting))
        elif is_dataclass(setting):
            _check_fields(key, setting)
        elif f.metadata.keys() - {"added", "free", "value"}:
            setattr(value, f.name, checked_value(key, setting, f.metadata))


def _own_part(key: str, value: object, home: str = "") -> OwnPart | None:
    """Make a custom part from its target or its settings; ``home`` is the default module."""
    if value is None or isinstance(value, OwnPart):
        return value
    settings = {"target": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{key}={value}: give {key}.target=package.module:Name")
    known = [f.name for f in fields(OwnPart)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{key}.{name}: no such setting; it has target, args and path")
    part = OwnPart(**{str(name): each for name, each in settings.items()})
    if home and isinstance(part.target, str) and ":" not in part.target:
        part.target = f"{home}:{part.target}"
    if not isinstance(part.args, dict):
        raise ConfigError(f"{key}.args={part.args}: give a dictionary")
    return part


#: The smallest positive integer that does not fit into int64.
_TOO_LARGE = 2**63
_SIGNS = ((">=", "ge", ge), (">", "gt", gt), ("<=", "le", le))


def checked_value(key: str, value: Any, rule: Mapping[str, Any]) -> Any:
    """Check a value against the metadata that ``number`` or ``choice`` gives to its field.

    Return the value; the metadata ``whole`` converts it to an int.
    """
    if not rule or (value is None and rule.get("optional", True)):
        return value
    if "allowed" in rule:
        value = "false" if value is False else value
        if value not in rule["allowed"]:
            raise ConfigError(
                f"{key}={value}: choose one of {', '.join(rule['allowed'])}{rule['where']}"
            )
        return value
    limits = [each for each in _SIGNS if rule[each[1]] is not None]
    bounds = " and ".join(f"{sign} {rule[name]:g}" for sign, name, _ in limits)
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise ConfigError(f"{key}={value}: out of range; give a number below 2**63 in size")
    if rule["whole"]:
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            raise ConfigError(f"{key}={value}: give a whole number {bounds}")
        value = int(value)
    if not (math.isfinite(value) and all(keeps(value, rule[name]) for _, name, keeps in limits)):
        raise ConfigError(f"{key}={value}: out of range; give a finite number {bounds}")
    return value


def check_device_name(device: str) -> None:
    """Refuse an unknown device name."""
    if not re.fullmatch(r"auto|cpu|cuda(:0|:[1-9]\d*)?", str(device), re.ASCII):
        raise ConfigError(
            f"device={device}: choose auto, cpu, cuda, or one of several GPUs, as cuda:1"
        )


def check_plain(where: str, value: object) -> None:
    """Refuse settings that still contain an interpolation, such as ``${oc.env:HOME}``."""
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{where}: {value:.80} is an interpolation; write its value instead")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_plain(where, each)


def typed(settings: Mapping[str, object]) -> DictConfig:
    """Merge the settings of each group into the schema of the choice that the group names.

    Raises:
        OmegaConfBaseException: a setting is not in the schema of its choice.
    """
    cfg = OmegaConf.merge(OmegaConf.structured(RootConfig), OmegaConf.create(dict(settings)))
    assert isinstance(cfg, DictConfig)
    for group in CHOICES:
        cfg[group] = typed_group(group, settings.get(group))
    return cfg


def typed_group(group: str, node: object) -> DictConfig | ListConfig:
    """Merge a group's settings into the schema of its choice; raise as :func:`typed` does."""
    if not isinstance(node, Mapping) or NAME not in node:
        raise ConfigError(f"{group}: its stored settings name no choice")
    schema = choice_of(group, str(node[NAME])).schema
    return OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(dict(node)))
