"""Parts of the user's own: found by ``target``, their ``args`` typed, their source remembered.

``GROUP=custom GROUP.target=package.module:Name GROUP.args.x=1`` is one more choice of the registry.
Its factory calls :func:`make_own`, which calls Name with keywords: those that klrl gives to the
parts of that group (:data:`GIVEN`), as far as Name takes them, and ``args``. ``args`` are checked
against the dataclass ``NameConfig`` beside Name, else against Name's own arguments.

No torch in here, but the user's module may import it. docs/extending.md is the page to this.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Union

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, first_line, with_line
from klrl.base.imports import import_users
from klrl.base.sources import Source, source_of
from klrl.config.checks import NoValueError, checked_value
from klrl.config.choices import CHOICES
from klrl.config.fields import OPEN_RANGE, OwnPart
from klrl.config.jobs import JobConfig

#: Setting of a part -> the arguments that klrl gives it, by keyword.
GIVEN: Mapping[str, tuple[str, ...]] = {
    "env": (),
    "actor": ("inputs", "outputs"),
    "actor.own_critic": ("inputs",),
    "env.wrappers": ("env",),
    "kl.own_estimator": ("log_ratio",),
    "kl.own_divergence": ("log_ratio",),
    "controller": ("coef", "frames"),
    "logger": ("folder", "settings", "group", "axis"),
    "advantage": ("config", "critic", "reward_scale", "normalizer"),
    "loss": ("config", "reference_estimator", "divergence", "reward_scale"),
    "loss.own_beta_rule": ("config", "beta", "dtarg"),
}

#: Of a part in a list: env.wrappers[0].
_INDEX = re.compile(r"\[\d+\]$")

#: Top-level module -> the module and its source when this process imported it.
_IMPORTED: dict[str, tuple[types.ModuleType | None, Source]] = {}


# ------------------------------------------------------------------------------------ which parts


def own_parts(config: JobConfig) -> Iterator[tuple[str, OwnPart]]:
    """The user's own parts of a job, each with its setting: ``controller``."""
    for group in CHOICES:
        part = getattr(config, group)
        if isinstance(part, OwnPart):
            yield group, part
        for f in dataclasses.fields(part):
            inner = getattr(part, f.name)
            if isinstance(inner, OwnPart):
                yield f"{group}.{f.name}", inner
            elif f.metadata.get("own") and isinstance(inner, list):
                for i, each in enumerate(inner):
                    yield f"{group}.{f.name}[{i}]", each


def complete(config: JobConfig) -> None:
    """Find the user's own parts of a job, in place: type their args, note their sources.

    Raises:
        ConfigError: a part cannot be found, or its args are not those that it takes.
    """
    for setting, part in own_parts(config):
        complete_part(setting, part)
        source = _source(setting, part)
        part.path, part.source, part.version = source.folder, source.digest, source.version
        if setting == "env":
            config.env.id = part.target  # the task's name


def complete_part(setting: str, part: OwnPart) -> None:
    """Type the args of one part, in place; its source stays as it is.

    Raises:
        ConfigError: as :func:`complete`.
    """
    part.args = _typed_args(setting, part, find_target(setting, part))


def restore(group: Any) -> None:
    """Make the parts within a group's settings again from what ``asdict`` made of them."""
    for f in dataclasses.fields(group):
        value = getattr(group, f.name)
        if f.metadata.get("own") and isinstance(value, Mapping):
            setattr(group, f.name, OwnPart(**value))


def help_of(setting: str, part: OwnPart) -> dict[str, str]:
    """Dotted key -> what the dataclass beside a part says of its args."""
    schema = _schema(part, find_target(setting, part))
    described = {} if schema is None else {f.name: f for f in dataclasses.fields(schema)}
    notes = {name: f.metadata.get("help", "") for name, f in described.items()}
    return {f"{setting}.args.{name}": note for name, note in notes.items() if note}


# ------------------------------------------------------------------------------------- its source


def check_sources(config: JobConfig) -> None:
    """Refuse a job whose parts are not those that it was checked with, or begun with.

    Raises:
        ConfigError: a source has changed since.
    """
    for line in changed_sources(config, [group for group in CHOICES if group != "logger"]):
        raise ConfigError(f"{line}; bring it back, or start another run")


def changed_sources(config: JobConfig, groups: Collection[str] = tuple(CHOICES)) -> list[str]:
    """One line for each part whose source is not the one in the settings of the job.

    Args:
        config: the job.
        groups: whose parts count.
    """
    lines = []
    for setting, part in own_parts(config):
        if setting.partition(".")[0] not in groups:
            continue
        find_target(setting, part)
        now = _source(setting, part)
        told, version = (part.source, part.version), (now.digest, now.version)
        if told != version:
            lines.append(
                f"{_named(setting, part)}: has changed since this run began "
                f"(it had {_shown(part.source, part.version)}, now "
                f"{_shown(now.digest, now.version)})"
            )
    return lines


def _shown(digest: str | None, version: str | None) -> str:
    return f"source {digest}" if digest else f"version {version}"


def manifest_of(config: JobConfig) -> dict[str, dict[str, str | None]]:
    """What a manifest holds of the parts: setting -> target, source, version."""
    names = ("target", "source", "version")
    return {
        setting: {name: getattr(part, name) for name in names}
        for setting, part in own_parts(config)
    }


def _source(setting: str, part: OwnPart) -> Source:
    """The source of a part as this process imported it.

    Raises:
        ConfigError: the files were changed after that.
    """
    top = _split(setting, part)[0].partition(".")[0]
    try:
        now = source_of(top)
    except ImportError as error:
        raise ConfigError(f"{_named(setting, part)}: {error}; write it into a file") from error
    module, before = _IMPORTED.get(top, (None, now))
    if module is not sys.modules.get(top):  # imported anew
        before = now
    _IMPORTED[top] = sys.modules.get(top), before
    if before != now:
        raise ConfigError(
            f"{_named(setting, part)}: the files of {top} have changed since this process imported "
            "them; start klrl again (a notebook: restart its kernel)"
        )
    return now


# ------------------------------------------------------------------------------------- finding it


def make_own(setting: str, part: OwnPart, given: Mapping[str, Any]) -> Any:
    """Call a part with what klrl gives and with its args.

    Args:
        setting: that holds it: ``controller``.
        part: from a job that was completed.
        given: values of :data:`GIVEN`.

    Raises:
        ConfigError: it cannot be found, or raises.
    """
    target = find_target(setting, part)
    takes, any_name = _arguments(_named(setting, part), target)
    wanted = {name: value for name, value in given.items() if any_name or name in takes}
    with told(setting, part):
        return target(**wanted, **part.args)


def find_function(setting: str, part: OwnPart) -> Callable[..., Any]:
    """A part that is itself a function of what klrl gives.

    Raises:
        ConfigError: it cannot be found, is a class, or does not take it.
    """
    found, given = find_target(setting, part), GIVEN[setting]
    takes, any_name = _arguments(_named(setting, part), found)
    missing = [name for name in given if name not in takes and not any_name]
    if inspect.isclass(found) or missing:
        raise ConfigError(
            f"{_named(setting, part)}: name a function of {', '.join(given)}, as in "
            f"def name({', '.join(given)}, power=2.0)"
        )
    return found


class told:
    """Turn what the user's code raises into one line: setting, value, error with its line.

    Args:
        setting: that holds the part.
        part: whose code is called.
    """

    def __init__(self, setting: str, part: OwnPart) -> None:
        self._text = _named(setting, part)
        self._args = f" with {setting}.args={dict(part.args)}" if part.args else ""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, ConfigError):
            raise ConfigError(f"{self._text}{self._args}: raised {with_line(error)}") from error


def require(setting: str, part: OwnPart, made: Any, kind: type, what: str) -> Any:
    """What a part made, if it is what the group needs.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(made, kind):
        raise ConfigError(f"{_named(setting, part)}: made {type(made).__name__}; {what}")
    return made


def _named(setting: str, part: OwnPart) -> str:
    return f"{setting}.target={part.target}"


def _split(setting: str, part: OwnPart) -> tuple[str, str]:
    if part.target is None:
        raise NoValueError(
            f"{setting}.target: has no value; give one, as in {setting}.target=package.module:Name"
        )
    module, _, name = part.target.rpartition(":")
    parts = [*module.split("."), *name.split(".")]
    if not module or not all(each.isidentifier() for each in parts):
        raise ConfigError(f"{_named(setting, part)}: write package.module:Name")
    if module == "__main__":
        raise ConfigError(f"{_named(setting, part)}: has no file; write it into a module")
    return module, name


def find_target(setting: str, part: OwnPart) -> Callable[..., Any]:
    """The class or function that a part names.

    Raises:
        ConfigError: it cannot be found, or is none.
    """
    module_name, name = _split(setting, part)
    found: Any = import_users(_named(setting, part), module_name, part.path)
    for each in name.split("."):
        if not hasattr(found, each):
            known = [key for key in vars(found) if not key.startswith("_")]
            raise ConfigError(
                f"{_named(setting, part)}: {module_name} has no {name}"
                f"{_nearest(each, known) or '; fix the name'}"
            )
        found = getattr(found, each)
    if not callable(found):
        raise ConfigError(
            f"{_named(setting, part)}: is of type {type(found).__name__}; name a class or a "
            "function"
        )
    return found


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# --------------------------------------------------------------------------------------- its args


def _typed_args(setting: str, part: OwnPart, target: Callable[..., Any]) -> dict[str, Any]:
    """The args of a part, typed and complete.

    Raises:
        ConfigError: an unknown, missing or wrong one.
    """
    text, given = _named(setting, part), GIVEN[_INDEX.sub("", setting)]
    takes, any_name = _arguments(text, target)
    for name in part.args:
        if name in given:
            raise ConfigError(f"{setting}.args.{name}: klrl gives it; drop it")
    schema = _schema(part, target)
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
    _check_taken(text, schema, typed, takes, given, any_name)
    with told(setting, part):
        schema(**typed)  # it may have checks of its own
    return typed


def _check_taken(
    text: str,
    schema: type,
    typed: Mapping[str, Any],
    takes: Mapping[str, inspect.Parameter],
    given: tuple[str, ...],
    any_name: bool,
) -> None:
    """The dataclass beside a part and the part's own arguments must be the same."""
    for name in typed:
        if name not in takes and not any_name:
            raise ConfigError(f"{text}: {schema.__name__} has {name}, which it does not take")
    for name, p in takes.items():
        if p.default is p.empty and name not in {*typed, *given}:
            raise ConfigError(
                f"{text}: asks for {name}, which neither klrl nor {schema.__name__} has"
            )


def _schema(part: OwnPart, target: Callable[..., Any]) -> type | None:
    """The dataclass ``NameConfig`` beside a part; None without one."""
    assert part.target is not None
    name = part.target.rpartition(":")[2].rpartition(".")[2]
    for module in (part.target.rpartition(":")[0], getattr(target, "__module__", "")):
        schema = getattr(sys.modules.get(module), f"{name}Config", None)
        if inspect.isclass(schema) and dataclasses.is_dataclass(schema):
            return schema
    return None


#: (name, type, field) of an argument, as ``dataclasses.make_dataclass`` takes it.
_Field = tuple[str, Any, Any]


def _fields_of_schema(schema: type) -> list[_Field]:
    hints = _hints(schema)
    fields = [f for f in dataclasses.fields(schema) if f.init]
    return [(f.name, hints.get(f.name, Any), _copied(f)) for f in fields]


def _copied(f: dataclasses.Field[Any]) -> Any:
    """A field like another; a dataclass takes no field of another one."""
    default = {"default": f.default} if f.default is not dataclasses.MISSING else {}
    if f.default_factory is not dataclasses.MISSING:
        default = {"default_factory": f.default_factory}
    return dataclasses.field(**default, metadata=dict(f.metadata))


def _fields_of_arguments(
    target: Callable[..., Any], takes: Mapping[str, inspect.Parameter]
) -> list[_Field]:
    """Of arguments that have no default, or a plain one."""
    hints = _hints(target.__init__ if inspect.isclass(target) else target)
    fields: list[_Field] = []
    for name, p in takes.items():
        if p.default is p.empty:
            fields.append((name, hints.get(name, Any), dataclasses.field()))
        elif p.default is None or isinstance(p.default, bool | int | float | str):
            fields.append((name, hints.get(name, Any), dataclasses.field(default=p.default)))
        else:
            unset = dataclasses.field(default=MISSING, metadata={_LEFT_OUT: True})
            fields.append((name, hints.get(name, Any), unset))
    return fields


#: Marks an argument that is left out unless it is given.
_LEFT_OUT = "left out"


def _hints(of: Any) -> dict[str, Any]:
    try:
        return {name: _plain(hint) for name, hint in typing.get_type_hints(of).items()}
    except Exception:  # a name that only a type checker imports
        return {}


def _plain(hint: Any) -> Any:
    """A type as OmegaConf reads it (``Optional[int]``, not ``int | None``); Any for others."""
    if isinstance(hint, types.UnionType):
        hint = Union[tuple(typing.get_args(hint))]  # noqa: UP007
    try:
        OmegaConf.structured(dataclasses.make_dataclass("_One", [("value", hint)]))
    except Exception:
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
            f"{_nearest(str(name), known) or f'; {has}'}"
        )
    # Those without a default may stand behind others.
    schema = dataclasses.make_dataclass("Args", fields, kw_only=True)
    node: DictConfig = OmegaConf.structured(schema)
    typed: dict[str, Any] = {}
    for name, f in known.items():
        key = f"{setting}.args.{name}"
        if name in part.args:
            try:
                node[name] = part.args[name]
            except OmegaConfBaseException as error:
                raise ConfigError(f"{key}={part.args[name]}: {_expected(error)}") from error
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


def _expected(error: OmegaConfBaseException) -> str:
    """What to give in place of a value of the wrong type."""
    text = first_line(error)
    for word, kind in (
        ("to Float", "a number"),
        ("to Integer", "a whole number"),
        ("to Boolean", "true or false"),
        ("ListConfig", "a list"),
        ("to Dict", "a dictionary"),
    ):
        if word in text:
            return f"give {kind}"
    return text


def _arguments(text: str, target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The keywords that a part takes, and whether it takes any other name too.

    ``**rest`` of a class goes to the class that it is derived from: its arguments count as well.

    Raises:
        ConfigError: they cannot be read.
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
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        own = parameters[1:] if inspect.isclass(target) else parameters
        takes = {**{p.name: p for p in own if p.kind in named}, **takes}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            return takes, False
    return takes, not inspect.isclass(target)


#: Their classes take nothing that a user would give.
_LIBRARIES = ("builtins", "torch", "typing", "abc")


def _constructors(target: type) -> list[Callable[..., Any]]:
    """``__init__`` of a class and of those that it is derived from, nearest first."""
    return [
        vars(each)["__init__"]
        for each in target.__mro__
        if "__init__" in vars(each) and each.__module__.partition(".")[0] not in _LIBRARIES
    ]
