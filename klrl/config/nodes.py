"""Registers klrl's choices with Hydra: their schemas and their default values."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import cache

from hydra.core.config_store import ConfigStore

from klrl.config.choices import ALL_CHOICES, NAME
from klrl.config.fields import nested_schema
from klrl.config.objectives import PRESETS
from klrl.config.schemas.root import RootConfig
from klrl.config.sweep import SweepRoot


@cache
def register_schemas() -> None:
    """Register every choice with Hydra, once."""
    store = ConfigStore.instance().store
    store(group="schema", name="root", node=RootConfig)
    store(group="schema", name="sweep", node=SweepRoot)
    for group, choices in ALL_CHOICES.items():
        for name, choice in choices.items():
            store(group=f"schema/{group}", name=name, node=choice.schema)
            top = {"defaults": [f"/schema/{group}/{name}@_here_", "_self_"], NAME: name}
            store(group=group, name=name, node=top | values_of(choice.schema) | dict(choice.values))
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


def values_of(schema: type) -> dict[str, object]:
    """Map each setting of a schema to its default value; omit settings without one."""
    found = {}
    for each in fields(schema):
        if "value" in each.metadata:
            found[each.name] = each.metadata["value"]
        elif nested := nested_schema(each):
            found[each.name] = values_of(nested)
    return found
