"""Registers klrl's choices with Hydra: their schemas and their default values."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from functools import cache

from hydra.core.config_store import ConfigStore

from klrl.config.choices import ALL_CHOICES
from klrl.config.fields import nested_schema
from klrl.config.objectives import PRESETS
from klrl.config.schemas.root import Ungrouped


@cache
def register_schemas() -> None:
    """Register every choice with Hydra, once."""
    store = ConfigStore.instance().store
    store(group="schema", name="root", node=asdict(Ungrouped()))
    for group, choices in ALL_CHOICES.items():
        for name, choice in choices.items():
            node = {**asdict(choice.schema(name=name)), **choice.values}
            store(group=group, name=name, node=node)
    for group, presets in PRESETS.items():
        for name, preset in presets.items():
            node = {"defaults": [f"{preset.below}@{group}", "_self_"], group: dict(preset.values)}
            store(group=group, name=name, node=node, package="_global_")


def notes_of(schema: type, prefix: str = "") -> dict[str, str]:
    """Map each setting of a schema to the comment of its declaration, read from the source code."""
    found = {}
    for kind in reversed(schema.__mro__[:-1]):
        above: list[str] = []
        for line in inspect.getsource(kind).splitlines():
            if line.startswith("    #: "):
                above.append(line[7:])
                continue
            name, declared, rest = line.strip().partition(": ")
            if declared and (note := " ".join(above) or rest.partition("  # ")[2]):
                found[f"{prefix}{name}"] = note
            above = []
    for each in fields(schema):
        if nested := nested_schema(each):
            found |= notes_of(nested, f"{prefix}{each.name}.")
    return found
