"""The config groups as Hydra sees them: the schema of each choice, and the folder of the YAMLs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore

from klrl.config import sweep
from klrl.config.choices import ALL_CHOICES
from klrl.config.jobs import RootConfig


@cache
def register_schemas() -> None:
    """Register the dataclasses with Hydra, once, in the group ``schema``: they are no choices."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    store.store(group="schema", name="sweep", node=sweep.SweepRoot)
    for group, choices in ALL_CHOICES.items():
        for name, choice in choices.items():
            store.store(group=f"schema/{group}", name=name, node=choice.schema)


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
