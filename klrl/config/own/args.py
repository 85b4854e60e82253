"""Completes the ``args`` of a custom part, and converts them to the annotated types."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from klrl.base.errors import ConfigError
from klrl.base.text import nearest
from klrl.config.checks import NoValueError
from klrl.config.fields import OwnPart
from klrl.config.own.find import arguments, import_target, setting_text
from klrl.config.own.parts import GIVEN

#: Types that a YAML file can store.
_PLAIN = bool | int | float | str | list | dict | None


def typed_args(setting: str, part: OwnPart) -> dict[str, object]:
    """Return a part's args in their annotated types, with the plain defaults of its target."""
    target = import_target(setting, part)
    text, given = setting_text(setting, part), GIVEN[setting.partition("[")[0]]
    takes, rest = arguments(text, target)
    own = {name: p for name, p in takes.items() if name not in given}
    free = rest and takes.keys() >= set(given)  # if not, ``**kwargs`` gets what klrl gives
    for name in part.args:
        key = f"{setting}.args.{name}"
        if name in given:
            raise ConfigError(f"{key}: klrl sets this argument; drop it")
        if name not in own and not free:
            has = f"; it has {', '.join(own)}" if own else "; it takes none"
            raise ConfigError(
                f"{key}: {part.target} has no such argument{nearest(str(name), own) or has}"
            )
    hints = _hints(target)
    typed: dict[str, object] = {}
    for name, p in own.items():
        if name in part.args:
            key = f"{setting}.args.{name}"
            typed[name] = _typed(key, part.args[name], hints.get(name, Any), p.default)
        elif p.default is p.empty:
            gives = f" (it gives {', '.join(given)})" if given else ""
            remedy = f"add {setting}.args.{name}=..., or give it a default"
            if whole := setting.partition("[")[0] * setting.endswith("]"):
                written = f"{whole}=[{{target: {part.target}, args: {{{name}: ...}}}}]"
                remedy = f"write {written}, or give {name} a default"
            if setting == "--to":
                remedy = f"give it a default, or wrap {part.target} in a function without {name}"
            raise NoValueError(
                f"{text}: requires {name}, which klrl does not give{gives}; {remedy}"
            )
        elif isinstance(p.default, bool | int | float | str | None):
            typed[name] = p.default
    return {**part.args, **typed}


def _hints(target: Callable[..., object]) -> dict[str, object]:
    """Map each argument to its annotated type; empty if a type cannot be resolved."""
    try:
        of = target.__init__ if inspect.isclass(target) else target
        return typing.get_type_hints(of, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return {}


def _typed(key: str, value: object, hint: Any, default: object) -> object:
    """Convert a value to its annotated type, if pydantic can and YAML can store the result."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    if default is None and value is None:
        return None
    try:
        adapter = TypeAdapter(hint, config={"coerce_numbers_to_str": True})
    except (PydanticUserError, NameError, TypeError):  # pydantic does not support the type
        return value
    try:
        typed = adapter.validate_python(value)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Input ")
        raise ConfigError(f"{key}={value}: {why}") from error
    if isinstance(value, bool) and not isinstance(typed, bool):  # pydantic converts true to 1
        raise ConfigError(f"{key}={value}: give a {type(typed).__name__}")
    return typed if isinstance(typed, _PLAIN) else value
