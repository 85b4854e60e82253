"""Turns overrides into checked jobs: Hydra composes configs, ``klrl.config.checks`` checks them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, raise_stop
from klrl.base.tables import yaml_text
from klrl.config import JobConfig, conf_dir, register_schemas
from klrl.config.checks import UnknownSettingError, to_config
from klrl.config.choices import ALL_CHOICES, ALL_GROUPS
from klrl.config.given import Given
from klrl.config.objectives import PRESETS
from klrl.config.overrides import REFUSALS, explained, parse
from klrl.config.own import complete
from klrl.config.rules.unread import check_all_read, check_objective
from klrl.config.shorthand import spelled_out


class Checked(NamedTuple):
    """A checked job, with the overrides that describe it."""

    overrides: list[Given]
    config: JobConfig


def compose(
    overrides: Sequence[str], config_dir: str | None = None, root: str = "config"
) -> DictConfig:
    """Compose a config with Hydra; ``root`` is the file in ``conf/`` that it starts from."""
    register_schemas()
    Plugins.instance().register(_CustomFiles)
    extra = [f"hydra.searchpath=[klrl://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return hydra.compose(root, overrides=[*overrides, *extra])


#: Path and modification time of each YAML file. The cache key includes them, so that edits take
#: effect in a running notebook.
Stamp = tuple[tuple[str, int], ...]


@lru_cache(maxsize=256)
def _composed(
    chosen: tuple[str, ...], config_dir: str | None, root: str, stamp: Stamp
) -> DictConfig:
    """Compose a config, or return a cached one, which callers must not change."""
    return compose(chosen, config_dir, root)


def _check_files(folder: Path, *only: Path) -> None:
    """Refuse files of choices, or only these, that Hydra would not load in any time."""
    files = (path for group in ALL_GROUPS for path in folder.glob(f"{group}/**/*.yaml"))
    for path in only or files:
        try:
            with suppress(yaml.YAMLError):  # Hydra says where
                yaml_text(path)
        except (OSError, ValueError) as error:
            told = f"--config-dir {folder}: {path}: {error}; write plain settings"
            raise ConfigError(told) from error
        if path.parent == folder / path.parent.name and path.stem in _names(path.parent.name):
            told = "klrl has a choice of that name; rename the YAML"
            raise ConfigError(f"--config-dir {folder}: {path}: {told}")


def _names(group: str) -> set[str]:
    return {*ALL_CHOICES.get(group, ()), *PRESETS.get(group, ())}


class _CustomFiles(FileConfigSource):
    """Loads files of ``--config-dir``, also those that a choice names outside its group."""

    left = 16  # interpolations and defaults; n that copy each other make up to 3 ** (n / 3) copies

    @staticmethod
    def scheme() -> str:
        return "klrl"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        _check_files(Path(self.path), path)
        result = super().load_config(config_path)
        written = OmegaConf.to_container(result.config)
        entries = written.get("defaults") if isinstance(written, dict) else None
        for each in entries if isinstance(entries, list) else ():
            self.left -= each != "_self_" and "override " not in str(each)
        self.left -= str(written).count("${")
        if self.left < 0:
            told = "and the files before it have more than 16 interpolations and defaults"
            raise ConfigError(f"--config-dir {self.path}: {path} {told}; write plain settings")
        return result


class Composer:
    """Composes jobs as Hydra does, in a tenth of Hydra's time.

    Hydra composes each set of choices once, and klrl caches that config. Overrides that set values
    are merged into a copy of it, in their order, as in Hydra.
    """

    def __init__(self, config_dir: str | None = None, root: str = "config") -> None:
        self._from = (config_dir, root)
        if config_dir:
            _check_files(Path(config_dir))
        folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
        files = sorted(path for folder in folders for path in folder.rglob("*.yaml"))
        self._stamp = tuple((str(path), path.stat().st_mtime_ns) for path in files)

    def composed(self, given: Sequence[Given]) -> DictConfig:
        """Compose one job's config; an error of Hydra, OmegaConf or YAML becomes a ConfigError."""
        with explained(given, self._from[0], (*REFUSALS, OSError)):
            return self._merged(given)

    def job_config(self, given: Sequence[Given]) -> JobConfig:
        """Compose and check one job."""
        given = spelled_out(given)
        with explained(given, self._from[0], (OmegaConfBaseException, UnknownSettingError)):
            config = to_config(self.composed(given))
        check_all_read(config, given)
        check_objective(config, given)
        complete(config)
        return config

    def _merged(self, given: Sequence[Given]) -> DictConfig:
        # Hydra itself applies all overrides up to the last that only it can apply.
        start = max((i for i, each in enumerate(given) if each.kind == "other"), default=-1) + 1
        rest = given[start:]
        chosen = (*given[:start], *(each for each in rest if each.kind == "choice"))
        try:
            cfg = copy.deepcopy(_composed(chosen, *self._from, self._stamp))
            for parsed in (each.parsed for each in rest if each.kind == "value"):
                if parsed.is_sweep_override():
                    return compose(given, *self._from)
                key, add = parsed.key_or_group, parsed.is_force_add()
                OmegaConf.update(cfg, key, parsed.value(), merge=True, force_add=add)
        except REFUSALS as error:
            raise_stop(error)
            # Given all overrides, Hydra raises a more precise error.
            return compose(given, *self._from)
        return cfg


def job_config(words: Sequence[str], config_dir: str | None = None) -> JobConfig:
    """Compose and check one job."""
    return Composer(config_dir).job_config(parse(words, config_dir))
