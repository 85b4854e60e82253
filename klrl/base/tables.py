"""Reads klrl's tables: YAML files next to the modules that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from klrl.base.files import read_plain

#: libyaml's loader if libyaml is installed, else PyYAML's own, which takes ten times as long.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Limit on the size of a YAML file in bytes, since libyaml parses 1 MB in a second.
_LONGEST = 1 << 20
#: Limit on the nesting of settings; above some 10,000 levels, libyaml overflows the stack.
_DEEPEST = 100


def yaml_text(path: Path) -> str:
    """Read a YAML file that someone else may have written; refuse what cannot be loaded safely.

    Raises:
        OSError, ValueError: the file cannot be read, is too deep, or has an alias.
        yaml.YAMLError: the file is no YAML.
    """
    text, depth = read_plain(path, _LONGEST).decode(), 0
    for event in yaml.parse(text, LOADER):  # unlike yaml.load, parse cannot crash or hang
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias, which klrl never writes")
    return text


def read_table(path: Path) -> Any:
    """Read a table."""
    return yaml.load(path.read_text("utf-8"), LOADER)
