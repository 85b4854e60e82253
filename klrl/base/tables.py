"""Reads klrl's tables: YAML files next to the modules that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from klrl.base.errors import ConfigError

Row = TypeVar("Row")
#: libyaml's loader if libyaml is installed, else PyYAML's own, which takes ten times as long.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_table(path: Path, *parts: str) -> Any:
    """Read a table; with ``parts``, it must be a dictionary with exactly these keys.

    Raises:
        ConfigError: the file is no valid YAML, or its keys are not ``parts``.
    """
    try:
        table = yaml.load(path.read_text("utf-8"), LOADER)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name}: is broken ({' '.join(str(error).split())})") from error
    if parts and (not isinstance(table, dict) or {*table} != {*parts}):
        raise ConfigError(f"{path.name}: has {', '.join(table)}; expected {', '.join(parts)}")
    return table


def entry_of(row: type[Row], path: Path, entry: dict[str, object]) -> Row:
    """Make an instance of the dataclass ``row`` from an entry of a table.

    Raises:
        ConfigError: the entry has an unknown field, or lacks a field.
    """
    try:
        return row(**entry)
    except TypeError as error:
        raise ConfigError(f"{path.name}: {entry}: {error}") from error
