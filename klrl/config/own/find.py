"""How a custom part is found by its ``target``, and called.

Name is called with keywords: those that klrl gives to the parts of that group (:data:`GIVEN`), as
far as Name takes them, and ``args``. What it raises becomes one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from klrl.base.errors import ConfigError, with_line
from klrl.base.imports import import_users
from klrl.base.text import nearest
from klrl.config.checks import NoValueError
from klrl.config.fields import OwnPart
from klrl.config.own.parts import GIVEN


def make_own(setting: str, part: OwnPart, given: Mapping[str, Any]) -> Any:
    """Call a part of a completed job with its args and with what klrl gives (:data:`GIVEN`)."""
    target = find_target(setting, part)
    takes, rest = arguments(named(setting, part), target)
    wanted = {name: value for name, value in given.items() if rest or name in takes}
    with told(setting, part):
        return target(**wanted, **part.args)


def find_function(setting: str, part: OwnPart) -> Callable[..., Any]:
    """A part that is itself a function of what klrl gives."""
    found, given = find_target(setting, part), GIVEN[setting]
    takes, rest = arguments(named(setting, part), found)
    missing = [name for name in given if name not in takes and not rest]
    if inspect.isclass(found) or missing:
        raise ConfigError(
            f"{named(setting, part)}: name a function of {', '.join(given)}, as in "
            f"def name({', '.join(given)}, power=2.0)"
        )
    return found


@contextmanager
def told(setting: str, part: OwnPart) -> Iterator[None]:
    """Turn what the user's code raises into one line: setting, value, error with its line."""
    args = f" with {setting}.args={dict(part.args)}" if part.args else ""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{named(setting, part)}{args}: raised {with_line(error)}") from error


def require(setting: str, part: OwnPart, made: Any, kind: type, what: str) -> Any:
    """What a part made, if it is what the group needs."""
    if not isinstance(made, kind):
        raise ConfigError(f"{named(setting, part)}: made {type(made).__name__}; {what}")
    return made


def find_target(setting: str, part: OwnPart) -> Callable[..., Any]:
    """The class or function that a part names."""
    module_name, name = split(setting, part)
    found: Any = import_users(named(setting, part), module_name, part.path)
    for each in name.split("."):
        if not hasattr(found, each):
            known = [key for key in vars(found) if not key.startswith("_")]
            raise ConfigError(
                f"{named(setting, part)}: {module_name} has no {name}"
                f"{nearest(each, known) or '; fix the name'}"
            )
        found = getattr(found, each)
    if not callable(found):
        raise ConfigError(
            f"{named(setting, part)}: is of type {type(found).__name__}; name a class or a function"
        )
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{named(setting, part)}: is an async function; name a plain one")
    return found


def split(setting: str, part: OwnPart) -> tuple[str, str]:
    """A target as (module, name).

    Raises:
        ConfigError: it is none.
    """
    if part.target is None:
        raise NoValueError(
            f"{setting}.target: has no value; give one, as in {setting}.target=package.module:Name"
        )
    module, _, name = part.target.rpartition(":")
    parts = [*module.split("."), *name.split(".")]
    if not module or not all(each.isidentifier() for each in parts):
        raise ConfigError(f"{named(setting, part)}: write package.module:Name")
    if module == "__main__":
        raise ConfigError(f"{named(setting, part)}: has no file; write it into a module")
    return module, name


def named(setting: str, part: OwnPart) -> str:
    """The setting with its value, as errors begin."""
    return f"{setting}.target={part.target}"


def arguments(text: str, target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The keywords that a part takes, and whether it takes the rest of klrl's as well.

    ``**rest`` of a class goes to the class that it is derived from: its arguments count as well,
    with :data:`ITS_DEFAULT` in place of theirs. That of a plain class is its own.
    """
    # A metaclass may hide a class's own arguments.
    calls = _constructors(target) if inspect.isclass(target) else [target]
    takes: dict[str, inspect.Parameter] = {}
    for call in calls:
        try:
            parameters = list(inspect.signature(call).parameters.values())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{text}: its arguments cannot be read ({error}); wrap it in a function"
            ) from error
        keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        own = parameters[1:] if inspect.isclass(target) else parameters
        mine = {p.name: p for p in own if p.kind in keywords}
        if call is not calls[0]:
            defaults = [p for p in mine.values() if p.default is not p.empty]
            mine |= {p.name: p.replace(default=ITS_DEFAULT) for p in defaults}
        takes = {**mine, **takes}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            return takes, False
    return takes, bool(calls)


#: What a class above has by default is left to it, unless it is given.
ITS_DEFAULT = object()


#: Their classes take nothing that a user would give.
_LIBRARIES = ("builtins", "torch", "typing", "abc")


def _constructors(target: type) -> list[Callable[..., Any]]:
    """``__init__`` of a class and of those that it is derived from, nearest first."""
    return [
        vars(each)["__init__"]
        for each in target.__mro__
        if "__init__" in vars(each)
        and (each is target or each.__module__.partition(".")[0] not in _LIBRARIES)
    ]
