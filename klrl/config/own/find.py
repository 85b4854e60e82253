"""Finds a custom part by its ``target``, checks its ``args``, and calls it.

The target is called with its ``args``, and with each argument in
:data:`klrl.config.own.parts.GIVEN` that it accepts. Its exceptions become one-line errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from klrl.base.errors import ConfigError, with_line
from klrl.base.imports import import_user_module, named_in
from klrl.base.text import nearest
from klrl.config.checks import NoValueError, refusal
from klrl.config.fields import OwnPart
from klrl.config.own.parts import BY_NAME, GIVEN

Made = TypeVar("Made")
#: A part's setting and value -> the shorthand that the user wrote, see klrl/config/shorthand.py.
WRITTEN: dict[str, str] = {}


class PartError(Exception):
    """A custom part returned a wrong object or value; :func:`config_errors` names the part."""


def make_own(
    setting: str,
    part: OwnPart,
    given: Mapping[str, object],
    kind: type[Made] = object,  # type: ignore[assignment]
    what: str = "",
) -> Made:
    """Call a custom part with its completed args, and with arguments of klrl from ``given``.

    Refuse a result that is no instance of ``kind``; the message ends with the remedy ``what``.
    """
    target = import_target(setting, part)
    takes, rest = arguments(setting_text(setting, part), target)
    rest = rest and setting not in BY_NAME
    wanted = {name: value for name, value in given.items() if rest or name in takes}
    with config_errors(setting, part):
        made = target(**wanted, **part.args)
        if not isinstance(made, kind):
            what = what or f"derive it from {kind.__module__}.{kind.__qualname__}"
            raise PartError(f"made {type(made).__name__}; {what}")
    return made


@contextmanager
def config_errors(setting: str, part: OwnPart) -> Iterator[None]:
    """Turn exceptions of the user's code into a ConfigError, with setting, value and code line."""
    text = setting_text(setting, part)
    args = f" with {setting}.args={dict(part.args)}" if part.args else ""
    try:
        yield
    except ConfigError:
        raise
    except PartError as error:
        raise ConfigError(f"{text}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text}{args}: raised {with_line(error)}") from error


def import_target(setting: str, part: OwnPart) -> Callable[..., Any]:
    """Import the class or function that is a part's target."""
    text, (module, _, name) = setting_text(setting, part), part.target.rpartition(":")
    if module.endswith(".py") and module[:-3].isidentifier():
        raise ConfigError(f"{text}: drop the .py: write {module[:-3]}:{name}")
    if not all(each.isidentifier() for each in (*module.split("."), *name.split("."))):
        raise ConfigError(f"{text}: write package.module:Name")
    if module == "__main__":
        raise ConfigError(f"{text}: has no file; write it into a module")
    found = named_in(text, import_user_module(text, module, part.path), module, name)
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{text}: is an async function; name a plain one")
    return found


def setting_text(setting: str, part: OwnPart) -> str:
    """Return the setting with its value, as the user wrote it, which starts an error message."""
    key = setting if setting in ("RUN", "other") else f"{setting}.target"
    text = f"{key}={part.target}"
    return WRITTEN.get(text, text)


def arguments(
    text: str, target: Callable[..., object]
) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the keywords that a target takes, and whether it takes ``**kwargs``."""
    # A metaclass may hide the arguments of ``__init__``.
    call = target.__init__ if inspect.isclass(target) else target
    if call is object.__init__:
        return {}, False
    try:
        own = list(inspect.signature(call).parameters.values())[inspect.isclass(target) :]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{text}: its arguments cannot be read ({error}); wrap it in a function"
        ) from error
    takes = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return takes, any(p.kind is p.VAR_KEYWORD for p in own)


def typed_args(setting: str, part: OwnPart) -> dict[str, object]:
    """Return a part's args in their annotated types, with the plain defaults of its target."""
    target, given = import_target(setting, part), GIVEN[setting.partition("[")[0]]
    takes, rest = arguments(text := setting_text(setting, part), target)
    own = {name: p for name, p in takes.items() if name not in given}
    # If not, ``**kwargs`` gets what klrl gives.
    free = rest and (setting in BY_NAME or takes.keys() >= set(given))
    for name in part.args:
        key = f"{setting}.args.{name}"
        if name in given:
            raise ConfigError(f"{key}: klrl sets this argument; drop it")
        if name not in own and not free:
            has = nearest(str(name), own) or f"; it has {', '.join(own) or 'none'}"
            raise ConfigError(f"{key}: {part.target} has no such argument{has}")
    hints = _hints(target)
    typed: dict[str, object] = {}
    for name, p in own.items():
        key = f"{setting}.args.{name}"
        if name in part.args:
            typed[name] = _typed(key, part.args[name], hints.get(name, Any), p.default)
        elif p.default is p.empty:
            gives = f" (it gives {', '.join(given)})" if given else ""
            way = f"add {key}=..."
            if setting.endswith("]"):  # of env.wrappers
                way = f"write {{target: {part.target}, args: {{{name}: ...}}}}"
            remedy = "give it a default" + f", or {way}" * (setting != "other")
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
        return get_type_hints(of, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return {}


def _typed(key: str, value: object, hint: Any, default: object) -> object:
    """Convert a value to its annotated type, if pydantic can and YAML can store the result."""
    if default is None and value is None:
        return None
    try:
        typed = TypeAdapter(hint, config={"coerce_numbers_to_str": True}).validate_python(value)
    except (PydanticUserError, NameError, TypeError):  # pydantic does not support the type
        return value
    except ValidationError as error:
        raise refusal(key, error.errors()[0]) from error
    if isinstance(value, bool) and not isinstance(typed, bool):  # pydantic converts true to 1
        raise ConfigError(f"{key}={value}: give a {type(typed).__name__}")
    return typed if isinstance(typed, bool | int | float | str | list | dict | None) else value
