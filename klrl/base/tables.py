"""klrl's own tables: a YAML beside the module that reads it. A wrong entry is named in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from klrl.base.errors import ConfigError
from klrl.base.text import nearest

Row = TypeVar("Row")
#: libyaml's, where it is there: ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_table(path: Path, *parts: str) -> Any:
    """What a table holds; with ``parts`` a dictionary of these keys.

    Raises:
        ConfigError: it is broken, or has other parts.
    """
    try:
        table = yaml.load(path.read_text("utf-8"), LOADER)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name}: is broken ({' '.join(str(error).split())})") from error
    if parts and (not isinstance(table, dict) or {*table} != {*parts}):
        raise ConfigError(f"{path.name}: has {', '.join(table)}; its parts are {', '.join(parts)}")
    return table


def entry_of(row: type[Row], path: Path, entry: Any) -> Row:
    """An entry of a table as a dataclass.

    Raises:
        ConfigError: it has an unknown field, lacks one, or holds a value of another type.
    """
    if not isinstance(entry, dict):
        raise ConfigError(f"{path.name}: {entry}: is no entry; give {{field: value, ...}}")
    hints = get_type_hints(row)
    needed = {f.name: f.default is f.default_factory is MISSING for f in fields(row)}  # type: ignore[arg-type]
    where = f"{path.name}: {next((v for k, v in entry.items() if k in hints), entry)}"
    for name, value in entry.items():
        if name not in needed:
            raise ConfigError(f"{where}: has no field {name}{nearest(name, needed) or '; drop it'}")
        if not isinstance(value, _classes(hints[name])):
            told = getattr(hints[name], "__name__", hints[name])
            raise ConfigError(f"{where}: {name}={value}: give {told}")
    for name in needed:
        if needed[name] and name not in entry:
            raise ConfigError(f"{where}: has no {name}; add it")
    return row(**entry)


def _classes(hint: Any) -> tuple[type, ...]:
    """What a value is an instance of: ``int | None``, ``Mapping[str, int]``, ``object``."""
    if get_origin(hint) is None or (
        isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Mapping)
    ):
        return (get_origin(hint) or hint,)
    return tuple(kind for each in get_args(hint) for kind in _classes(each))
