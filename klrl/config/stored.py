"""Stored settings: ``.hydra/config.yaml`` of a run, read back by the names of its choices.

0.1.0 spelled the name of a choice in six ways, and left it out where a group had one choice per
kind of job; :func:`renamed` says what it meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from klrl.base.errors import ConfigError
from klrl.config.choices import CHOICES, NAME, choice_of
from klrl.config.jobs import RootConfig

#: group -> what 0.1.0 called the name of its choice
_NAMED = {
    "env": "task",
    "actor": "distribution",
    "reference": "kind",
    "kl": "mode",
    "controller": "kind",
}
#: A value of that setting which is called otherwise now.
_VALUES = {("actor", "auto"): "mlp"}
#: group -> the choices to which 0.1.0 gave no name, each with a setting that no other one has
_UNNAMED = {
    "env": {"gym": "kwargs"},
    "advantage": {"gae": "gamma", "group": "baseline"},
    "learner": {"ppo": "epochs"},
}


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as this version spells them.

    Args:
        settings: group -> its settings, of this version or of 0.1.0; all groups or some of them.

    Raises:
        ConfigError: a group whose choice cannot be told.
    """
    return {
        group: _renamed(group, node) if group in CHOICES else node
        for group, node in settings.items()
    }


def _renamed(group: str, node: Any) -> dict[str, Any]:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{group}={node}: its stored settings are no settings of a choice")
    if NAME in node:
        return dict(node)
    rest = dict(node)
    old = _NAMED.get(group)
    if old in rest:
        name = rest.pop(old)
        return {NAME: _VALUES.get((group, name), name), **rest}
    found = [name for name, mark in _UNNAMED.get(group, {}).items() if mark in rest]
    if len(found) != 1:
        raise ConfigError(f"{group}: its stored settings name no choice")
    return {NAME: found[0], **rest}


def typed(settings: Mapping[str, Any]) -> DictConfig:
    """Give each group the schema of the choice that it names.

    Raises:
        ConfigError: a choice is not registered, or a name is missing.
        OmegaConfBaseException: a setting that its schema has not.
    """
    settings = renamed(settings)
    cfg = OmegaConf.merge(OmegaConf.structured(RootConfig), OmegaConf.create(settings))
    assert isinstance(cfg, DictConfig)
    for group in CHOICES:
        node = settings.get(group)
        if node is None:
            raise ConfigError(f"{group}: is missing among the stored settings")
        schema = choice_of(group, str(node[NAME])).schema
        cfg[group] = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(node))
    return cfg
