"""Finds a custom part by its ``target``, and calls it.

The target is called with its ``args``, and with each argument in
:data:`klrl.config.own.parts.GIVEN` that it accepts. Its exceptions become one-line errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from klrl.base.errors import ConfigError, with_line
from klrl.base.imports import import_user_module, named_in
from klrl.config.checks import NoValueError
from klrl.config.fields import OwnPart

Made = TypeVar("Made")


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
    wanted = {name: value for name, value in given.items() if rest or name in takes}
    with config_errors(setting, part):
        made = target(**wanted, **part.args)
        if not isinstance(made, kind):
            what = what or f"derive it from {kind.__module__}.{kind.__qualname__}"
            raise PartError(f"made {type(made).__name__}; {what}")
    return made


class PartError(Exception):
    """A custom part returned a wrong object or value; :func:`config_errors` names the part."""


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
    if part.target is None:
        raise NoValueError(
            f"{setting}.target: has no value; give one, as in {setting}.target=package.module:Name"
        )
    text, (module, _, name) = setting_text(setting, part), part.target.rpartition(":")
    parts = [*module.split("."), *name.split(".")]
    if module.endswith(".py") and module[:-3].isidentifier():
        raise ConfigError(f"{text}: drop the .py: write {module[:-3]}:{name}")
    if not module or not all(each.isidentifier() for each in parts):
        raise ConfigError(f"{text}: write package.module:Name")
    if module == "__main__":
        raise ConfigError(f"{text}: has no file; write it into a module")
    found = named_in(text, import_user_module(text, module, part.path), module, name)
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{text}: is an async function; name a plain one")
    return found


def setting_text(setting: str, part: OwnPart) -> str:
    """Return the setting with its value, which starts an error message."""
    key = setting if setting.startswith("--") else f"{setting}.target"
    return f"{key}={part.target}"


def arguments(
    text: str, target: Callable[..., object]
) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the keywords that a target takes, and whether it takes ``**kwargs``."""
    call = target
    if inspect.isclass(target):  # a metaclass may hide the arguments of ``__init__``
        call = target.__init__
        if call is object.__init__:
            return {}, False
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{text}: its arguments cannot be read ({error}); wrap it in a function"
        ) from error
    own = parameters[1:] if inspect.isclass(target) else parameters
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {p.name: p for p in own if p.kind in keywords}
    return takes, any(p.kind is p.VAR_KEYWORD for p in own)
