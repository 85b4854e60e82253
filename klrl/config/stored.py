"""Reads the stored settings of a run, ``.hydra/config.yaml``, by the names of its choices.

0.1.0 had six keys for the name of a choice, and stored none where a group had one choice per
domain; :func:`renamed` translates both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from klrl.base.errors import ConfigError
from klrl.config.choices import CHOICES, NAME, choice_of
from klrl.config.schemas.root import RootConfig

#: group -> the key under which 0.1.0 stored the name of its choice
_NAMED = {
    "env": "task",
    "actor": "distribution",
    "reference": "kind",
    "kl": "mode",
    "controller": "kind",
}
#: (group, name in 0.1.0) -> name now
_VALUES = {("actor", "auto"): "mlp"}
#: group -> choice without a name in 0.1.0 -> a setting that only this choice has
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
        ConfigError: the settings of a group do not say which choice they are of.
    """
    return {
        group: _renamed(group, node) if group in CHOICES else node
        for group, node in settings.items()
    }


def _renamed(group: str, node: Any) -> dict[str, Any]:
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{group}={node}: is not a mapping of settings; give {group} as {{{NAME}: {node}, ...}}"
        )
    if NAME in node:
        return dict(node)
    rest = dict(node)
    old = _NAMED.get(group)
    if old in rest:
        name = rest.pop(old)
        return {NAME: _VALUES.get((group, name), name), **rest}
    names = [name for name, mark in _UNNAMED.get(group, {}).items() if mark in rest]
    if len(names) != 1:
        raise ConfigError(f"{group}: its stored settings name no choice")
    return {NAME: names[0], **rest}


def check_plain(where: str, value: Any) -> None:
    """Refuse settings that refer to others, as to a variable of the environment.

    Raises:
        ConfigError: there is such a value.
    """
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{where}: {value:.80} is no plain value; write its value there")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_plain(where, each)


def typed(settings: Mapping[str, Any]) -> DictConfig:
    """Give each group the schema of the choice that it names.

    Raises:
        ConfigError: a choice is not registered, or a name is missing.
        OmegaConfBaseException: a setting is not in the schema of its choice.
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
