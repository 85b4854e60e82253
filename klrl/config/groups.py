"""The config groups as Hydra sees them: schemas by choice, and where their YAML files lie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore

from klrl.config import sweep
from klrl.config.choices import ALL_CHOICES
from klrl.config.jobs import RootConfig


@cache
def register_schemas() -> None:
    """Make the dataclasses known to Hydra, once, in a group of their own: they are no choices."""
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
