"""Reads the stored settings of a run, ``.hydra/config.yaml``, by the names of its choices."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, ListConfig, OmegaConf

from klrl.base.errors import ConfigError
from klrl.config.choices import CHOICES, NAME, choice_of
from klrl.config.schemas.root import RootConfig


def check_plain(where: str, value: object) -> None:
    """Refuse settings that refer to others, as to a variable of the environment."""
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{where}: {value:.80} is no plain value; write its value there")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_plain(where, each)


def typed(settings: Mapping[str, object]) -> DictConfig:
    """Give each group the schema of the choice that it names.

    Raises:
        OmegaConfBaseException: a setting is not in the schema of its choice.
    """
    cfg = OmegaConf.merge(OmegaConf.structured(RootConfig), OmegaConf.create(dict(settings)))
    assert isinstance(cfg, DictConfig)
    for group in CHOICES:
        cfg[group] = typed_group(group, settings.get(group))
    return cfg


def typed_group(group: str, node: object) -> DictConfig | ListConfig:
    """A group of settings in the schema of the choice that it names; errors as of :func:`typed`."""
    if not isinstance(node, Mapping) or NAME not in node:
        raise ConfigError(f"{group}: its stored settings name no choice")
    schema = choice_of(group, str(node[NAME])).schema
    return OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(dict(node)))
