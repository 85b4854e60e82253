"""Lists every group, choice and setting of the command line, for hints and help.

The lists come from the schemas, and from the YAML files of klrl and ``--config-dir``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields
from functools import cache
from pathlib import Path

import yaml

from klrl.base.files import SMALL
from klrl.config import ALL_CHOICES, Ungrouped, conf_dir
from klrl.config.choices import SET_BY_KLRL
from klrl.config.fields import nested_schema
from klrl.config.objectives import PRESETS


@dataclass(frozen=True)
class KnownSetting:
    """A setting of the command line."""

    key: str  # such as ``kl.estimator``
    type: str  # the declared type, such as ``list[int]``
    schemas: tuple[str, ...] = ()  # choices that have the setting; empty if it is in no group


def choice_files(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """Map the names of a group's YAML files to paths; klrl's files override the user's."""
    folders = ([Path(config_dir) / group] if config_dir else []) + [conf_dir() / group]
    found = (path for folder in folders for path in folder.glob("*.yaml") if path.is_file())
    return {path.stem: path for path in found if path.stat().st_size <= SMALL}


def described(group: str, config_dir: str | None = None) -> dict[str, str]:
    """Map each name that ``group=`` accepts to its line in ``--help``."""
    found = {}
    for name, path in choice_files(group, config_dir).items():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        notes = (line[2:] for line in lines if line.startswith("# ") and line[2:3] != "@")
        found[name] = next(notes, "")
    found |= {name: each.what for name, each in ALL_CHOICES.get(group, {}).items()}
    found |= {name: each.what for name, each in PRESETS.get(group, {}).items()}
    return dict(sorted(found.items()))


def declared_in(group: str) -> list[str]:
    """List the files and folders of klrl that declare the choices of a group."""
    schemas = (each.schema.__module__ for each in ALL_CHOICES.get(group, {}).values())
    files = [f"{each.replace('.', '/')}.py" for each in dict.fromkeys(schemas)]
    return [*files, *["klrl/config/objectives.py"] * (group in PRESETS), f"conf/{group}"]


@cache
def settings() -> dict[str, KnownSetting]:
    """Return all settings that users can set, by key."""
    by_key: dict[str, KnownSetting] = {}
    for group, registered in ALL_CHOICES.items():
        for schema, choice in registered.items():
            for name, each in _fields(choice.schema):
                key = f"{group}.{name}"
                before = by_key[key].schemas if key in by_key else ()
                by_key[key] = KnownSetting(key, str(each.type), (*before, schema))
    by_key |= {name: KnownSetting(name, str(each.type)) for name, each in _fields(Ungrouped)}
    settable = (key for key in sorted(by_key) if key.rpartition(".")[2] not in SET_BY_KLRL)
    return {key: by_key[key] for key in settable}


def _fields(node: type, prefix: str = "") -> Iterator[tuple[str, Field[object]]]:
    """Yield the dotted name and the field of each setting in a schema, nested ones included."""
    for each in fields(node):
        if nested := nested_schema(each):
            yield from _fields(nested, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", each


@cache
def defaults() -> dict[str, str]:
    """Map each group to its default choice, if it has one."""
    texts = [(conf_dir() / f"{name}.yaml").read_text("utf-8") for name in ("config", "sweep")]
    return {
        group: name
        for text in texts
        for group, name in re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE)
        if name != "null"
    }


def chosen(group: str, overrides: Sequence[str], config_dir: str | None = None) -> str:
    """Return a group's choice: of the overrides, else of the experiment, the env or the default.

    An experiment or env has the choices of the YAML that it is based on.
    """
    found = dict(each.split("=", 1) for each in overrides if "=" in each)
    for preset in ("experiment", "env"):
        files = choice_files(preset, config_dir)
        name = found.get(preset, defaults().get(preset, ""))
        while path := files.pop(name, None):
            entries = (yaml.safe_load(path.read_text("utf-8")) or {}).get("defaults", [])
            for each in entries:
                if isinstance(each, dict):
                    ((key, value),) = each.items()
                    found.setdefault(key.removeprefix("override /"), value)
            name = next((each for each in map(str, entries) if each in files), "")
    return found.get(group, defaults().get(group, "?"))
