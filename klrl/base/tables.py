"""klrl's own tables: a YAML beside the module that reads it. A wrong entry is named in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from klrl.base.errors import ConfigError

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


def entry_of(row: type[Row], path: Path, entry: dict[str, object]) -> Row:
    """An entry of a table as a dataclass.

    Raises:
        ConfigError: it has an unknown field, or lacks one.
    """
    try:
        return row(**entry)
    except TypeError as error:
        raise ConfigError(f"{path.name}: {entry}: {error}") from error
