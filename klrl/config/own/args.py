"""The ``args`` of a custom part: typed, complete, in their ranges.

By the dataclass ``NameConfig`` next to Name, else by Name's own arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Union

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError
from klrl.base.text import nearest
from klrl.config.checks import NoValueError, checked_value
from klrl.config.explain import expected
from klrl.config.fields import OPEN_RANGE, OwnPart
from klrl.config.own.find import arguments, find_target, named, told
from klrl.config.own.parts import GIVEN

#: Of a part in a list: env.wrappers[0].
_INDEX = re.compile(r"\[\d+\]$")


def typed_args(setting: str, part: OwnPart, target: Callable[..., Any]) -> dict[str, Any]:
    """The args of a part, typed and complete."""
    text, given = named(setting, part), GIVEN[_INDEX.sub("", setting)]
    takes, rest = arguments(text, target)
    any_name = rest and not inspect.isclass(target)  # the rest of a class's is klrl's alone
    for name in part.args:
        if name in given:
            raise ConfigError(f"{setting}.args.{name}: klrl gives it; drop it")
    schema = schema_of(part, target)
    if schema is None:
        own = {name: p for name, p in takes.items() if name not in given}
        for name, p in own.items():
            if p.default is p.empty and name not in part.args:
                gives = f" (it gives {', '.join(given)})" if given else ""
                raise NoValueError(
                    f"{text}: asks for {name}, which klrl does not give{gives}; add "
                    f"{setting}.args.{name}=..., or give it a default"
                )
        return _typed(setting, part, _fields_of_arguments(target, own), any_name)
    typed = _typed(setting, part, _fields_of_schema(schema), False)
    # The dataclass and the part's own arguments must be the same.
    for name in typed:
        if name not in takes and not any_name:
            raise ConfigError(f"{text}: {schema.__name__} has {name}, which it does not take")
    for name, p in takes.items():
        if p.default is p.empty and name not in {*typed, *given}:
            raise ConfigError(
                f"{text}: asks for {name}, which neither klrl nor {schema.__name__} has"
            )
    with told(setting, part):
        schema(**typed)  # it may have checks of its own
    return typed


def schema_of(part: OwnPart, target: Callable[..., Any]) -> type | None:
    """The dataclass ``NameConfig`` next to a part; None without one."""
    assert part.target is not None
    name = part.target.rpartition(":")[2].rpartition(".")[2]
    for module in (part.target.rpartition(":")[0], getattr(target, "__module__", "")):
        schema = getattr(sys.modules.get(module), f"{name}Config", None)
        if inspect.isclass(schema) and dataclasses.is_dataclass(schema):
            return schema
    return None


def help_of(setting: str, part: OwnPart) -> dict[str, str]:
    """Dotted key -> what the dataclass next to a part says of its args."""
    schema = schema_of(part, find_target(setting, part))
    described = {} if schema is None else {f.name: f for f in dataclasses.fields(schema)}
    notes = {name: f.metadata.get("help", "") for name, f in described.items()}
    return {f"{setting}.args.{name}": note for name, note in notes.items() if note}


#: (name, type, field) of an argument, as ``dataclasses.make_dataclass`` takes it.
_Field = tuple[str, Any, Any]


def _fields_of_schema(schema: type) -> list[_Field]:
    hints = _hints(schema)
    fields: list[_Field] = []
    for f in dataclasses.fields(schema):
        # A dataclass takes no field of another one.
        again = {name: getattr(f, name) for name in ("default", "default_factory", "metadata")}
        if f.init:
            fields.append((f.name, hints.get(f.name, Any), dataclasses.field(**again)))
    return fields


def _fields_of_arguments(
    target: Callable[..., Any], takes: Mapping[str, inspect.Parameter]
) -> list[_Field]:
    """Of arguments that have no default, or a plain one."""
    hints = _hints(target.__init__ if inspect.isclass(target) else target)
    fields: list[_Field] = []
    for name, p in takes.items():
        default = dataclasses.field(default=MISSING, metadata={_LEFT_OUT: True})
        if p.default is p.empty:
            default = dataclasses.field()
        elif p.default is None or isinstance(p.default, bool | int | float | str):
            default = dataclasses.field(default=p.default)
        fields.append((name, hints.get(name, Any), default))
    return fields


#: Marks an argument that is left out unless it is given.
_LEFT_OUT = "left out"


def _hints(of: Any) -> dict[str, Any]:
    """Types by name; none where they cannot be had, as of what only a type checker imports."""
    try:
        hints = typing.get_type_hints(of)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return {}
    return {name: _plain(hint) for name, hint in hints.items()}


def _plain(hint: Any) -> Any:
    """A type as OmegaConf reads it (``Optional[int]``, not ``int | None``); Any for others."""
    if isinstance(hint, types.UnionType):
        hint = Union[tuple(typing.get_args(hint))]  # noqa: UP007
    try:
        OmegaConf.structured(dataclasses.make_dataclass("_One", [("value", hint)]))
    except (OmegaConfBaseException, AssertionError):  # it asserts what a key of a dict is
        return Any
    return hint


def _typed(setting: str, part: OwnPart, fields: list[_Field], any_name: bool) -> dict[str, Any]:
    """Convert args by their declared types, and check their ranges."""
    known = {name: f for name, _, f in fields}
    free = {name: value for name, value in part.args.items() if name not in known}
    for name in free if not any_name else ():
        has = f"it has {', '.join(known)}" if known else "it takes none"
        raise ConfigError(
            f"{setting}.args.{name}: {part.target} has no such argument"
            f"{nearest(str(name), known) or f'; {has}'}"
        )
    # Those without a default may come after others.
    schema = dataclasses.make_dataclass("Args", fields, kw_only=True)
    node: DictConfig = OmegaConf.structured(schema)
    typed: dict[str, Any] = {}
    for name, f in known.items():
        key = f"{setting}.args.{name}"
        if name in part.args:
            try:
                node[name] = part.args[name]
            except OmegaConfBaseException as error:
                given = part.args[name]
                raise ConfigError(f"{key}={given}: {expected(error, key, given)}") from error
        if OmegaConf.is_missing(node, name):
            if _LEFT_OUT in f.metadata:
                continue
            raise NoValueError(f"{key}: has no value; give one, as in {key}=...")
        value = OmegaConf.to_container(node)[name]  # type: ignore[index, call-overload]
        typed[name] = _in_range(key, value, f.metadata)
    return {**typed, **free}


def _in_range(key: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    rule = {name: each for name, each in metadata.items() if name in ("allowed", *OPEN_RANGE)}
    if "allowed" in rule:
        return checked_value(key, value, {"optional": False, **rule})
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return checked_value(key, value, {**OPEN_RANGE, **rule}) if rule and number else value
