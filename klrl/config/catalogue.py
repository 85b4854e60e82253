"""Every group, choice and setting that the command line knows: for hints, help and completion.

Read from the YAMLs (and the user's own, below ``--config-dir``) and from the schemas. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from klrl.config import ALL_CHOICES, GROUPS, SWEEP_GROUPS, RootConfig, conf_dir
from klrl.config.choices import NAME

#: The groups in the order of the help; ``experiment`` is a preset over the others.
ALL_GROUPS = (*GROUPS, "experiment", *SWEEP_GROUPS)


@dataclass(frozen=True)
class Setting:
    """A setting of the command line.

    Attributes:
        key: as in ``kl.estimator``.
        type: as its dataclass declares it, as ``list[int]``.
        allowed: its values, where the list of them is closed.
        schemas: of its group, those that have it; empty outside any group.
    """

    key: str
    type: str
    allowed: tuple[str, ...]
    schemas: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The part before the first dot; empty without one."""
        return self.key.partition(".")[0] if "." in self.key else ""

    @property
    def name(self) -> str:
        """The part after the last dot."""
        return self.key.rpartition(".")[2]


def choice_files(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """The YAML of each choice of a group; of two with one name Hydra takes klrl's."""
    folders = ([Path(config_dir) / group] if config_dir else []) + [conf_dir() / group]
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def choices(group: str, config_dir: str | None = None) -> list[str]:
    """The names that ``group=`` accepts."""
    return sorted(choice_files(group, config_dir))


@cache
def settings() -> dict[str, Setting]:
    """All settings by their keys, those that a choice sets by itself left out."""
    found: dict[str, Setting] = {}
    for group, registered in ALL_CHOICES.items():
        for schema, choice in registered.items():
            for name, each in _fields(choice.schema):
                key = f"{group}.{name}"
                before = found[key].schemas if key in found else ()
                found[key] = Setting(key, str(each.type), _allowed(each), (*before, schema))
    for name, each in _fields(RootConfig):
        if name not in GROUPS:
            found[name] = Setting(name, str(each.type), _allowed(each))
    of_choices = {f"{group}.{NAME}" for group in ALL_CHOICES}
    return {key: found[key] for key in sorted(found) if key not in of_choices}


def _fields(node: type, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """The fields of a schema with their dotted names; of a nested one, its own."""
    for each in fields(node):
        nested = each.default_factory
        if nested is not MISSING and isinstance(nested, type) and is_dataclass(nested):
            yield from _fields(nested, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", each


def _allowed(each: Field[Any]) -> tuple[str, ...]:
    if "allowed" in each.metadata:
        return tuple(each.metadata["allowed"])
    return ("false", "true") if str(each.type) == "bool" else ()


def readers(setting: Setting, config_dir: str | None = None) -> list[str]:
    """The choices of its group that have a setting, presets over them left out.

    Empty outside any group.
    """
    files = choice_files(setting.group, config_dir) if setting.schemas else {}
    return sorted(name for name, path in files.items() if _named(path)[0] in setting.schemas)


def schema_of(group: str, choice: str, config_dir: str | None = None) -> str | None:
    """The schema of a choice; of a preset over another choice (``gym@env``), that one's."""
    files = choice_files(group, config_dir)
    seen: set[str] = set()
    name: str | None = choice
    while name in files and name not in seen:
        seen.add(name)
        schema, name = _named(files[name])
        if schema is not None:
            return schema
    return None


def _named(path: Path) -> tuple[str | None, str | None]:
    """The schema, and the other choice, that the YAML of a choice names in its defaults list."""
    text = path.read_text(encoding="utf-8")
    schema = re.search(r"/schema/\w+/(\w+)@", text)
    other = re.search(r"^  - (\w+)@", text, re.MULTILINE)
    return schema and schema[1], other and other[1]


@cache
def defaults() -> dict[str, str]:
    """The choice of each group where none is given."""
    texts = [(conf_dir() / f"{name}.yaml").read_text("utf-8") for name in ("config", "sweep")]
    return {
        group: name
        for text in texts
        for group, name in re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE)
        if name != "null"
    }


def chosen(group: str, words: Sequence[str], config_dir: str | None = None) -> str:
    """The choice of a group on a command line: given, of its experiment, or the default."""
    given = [word.split("=", 1)[1] for word in words if word.startswith(f"{group}=")]
    if given:
        return given[-1]
    return _of_experiment(words, config_dir).get(group, defaults().get(group, "?"))


def _of_experiment(words: Sequence[str], config_dir: str | None) -> dict[str, str]:
    """The choices that ``experiment=NAME`` makes."""
    names = [word.split("=", 1)[1] for word in words if word.startswith("experiment=")]
    path = choice_files("experiment", config_dir).get(names[-1]) if names else None
    if path is None:
        return {}
    return dict(re.findall(r"- override /(\w+): (\w+)", path.read_text(encoding="utf-8")))
