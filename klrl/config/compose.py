"""Turns overrides into checked jobs: Hydra composes configs, ``klrl.config.checks`` checks them."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, raise_stop
from klrl.base.tables import yaml_text
from klrl.config import JobConfig, Ungrouped, conf_dir, register_schemas
from klrl.config.checks import UnknownSettingError, check_names_unset, to_config
from klrl.config.choices import ALL_GROUPS
from klrl.config.overrides import (
    check_no_second_choice,
    check_one_choice,
    explained,
    key_of,
    parse_overrides,
    quote_paths,
)
from klrl.config.own import complete
from klrl.config.rules.unread import check_all_read, check_objective


class Checked(NamedTuple):
    """A checked job, with the overrides that describe it."""

    overrides: list[str]
    config: JobConfig


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line into flags and overrides; convert overrides to Hydra's grammar."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    try:
        args, unknown = parser.parse_known_intermixed_args([_without_dashes(each) for each in argv])
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see --help") from error
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; settings are KEY=VALUE, see --help")
    check_no_second_choice(args.overrides)
    args.overrides = prepared(args.overrides, args.config_dir)
    return args


def _without_dashes(argument: str) -> str:
    """Turn ``--kl.coef=1``, as wandb agents write it, into ``kl.coef=1``; keep other arguments."""
    setting = argument.removeprefix("--")
    known = key_of(setting).partition(".")[0] in _VALUES | _CHOSEN | {"sweep", "resume", "hydra"}
    return setting if known and "=" in argument else argument


def prepared(arguments: Sequence[str], config_dir: str | None) -> list[str]:
    """Convert overrides to Hydra's grammar; refuse other arguments and a missing ``config_dir``."""
    bare = [each for each in arguments if "=" not in each and not each.startswith("~")]
    bare += [each for each in arguments if not key_of(each)]
    if bare:
        from klrl.config.explain import not_an_override

        raise not_an_override(bare[0], config_dir)
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder; give an existing one")
    return quote_paths(allow_new_keys(arguments))


_OPEN = re.compile(r"(env\.(template_)?kwargs|launcher\.slurm|\w+\.args|\w+\.own_\w+)[.=]")


def allow_new_keys(overrides: Sequence[str]) -> list[str]:
    """Write ``env.kwargs.g=9.81`` with ``++``, which Hydra requires for a dictionary's new keys."""
    return [f"++{each}" if _OPEN.match(each) else each for each in overrides]


def _check_deletions(overrides: Sequence[str]) -> None:
    """Refuse ``~seed`` and ``~kl``; only keys of a dictionary, as ``~env.kwargs.g``, can go."""
    for override in overrides:
        if override.startswith("~") and not _OPEN.match(override[1:]):
            # Hydra writes =null to a deletion in a sweep.
            given = override.removesuffix("=null")
            raise ConfigError(f"{given}: cannot be deleted; set a value, or drop it")


def flags(config_dir: str | None) -> list[str]:
    """Return the flags of a command line that :func:`parse_args` reads as this folder."""
    return ["--config-dir", config_dir] if config_dir else []


def compose(
    overrides: Sequence[str], config_dir: str | None = None, root: str = "config"
) -> DictConfig:
    """Compose a config with Hydra; ``root`` is the file in ``conf/`` that it starts from."""
    register_schemas()
    Plugins.instance().register(_CustomFiles)
    extra = [f"hydra.searchpath=[klrl://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return hydra.compose(root, overrides=[*overrides, *extra])


#: Errors of Hydra for a wrong override or file: ValueError for kl=null, OverflowError for an
#: integer too large for a float, RecursionError for a YAML file that includes itself, TypeError
#: for shuffle(1).
_REFUSALS = (
    *(HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError),
    *(OverflowError, RecursionError, TypeError),
)


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

    def explained(self, overrides: Sequence[str]) -> DictConfig:
        """Compose one job's config; an error of Hydra, OmegaConf or YAML becomes a ConfigError."""
        check_one_choice(overrides)
        _check_deletions(overrides)
        with explained(overrides, self._from[0], *_REFUSALS, OSError):
            return self._merged(overrides)

    def job_config(self, overrides: list[str]) -> JobConfig:
        """Compose and check one job."""
        cfg = self.explained(overrides)
        given = keys(overrides)
        check_names_unset(given)
        try:
            with explained(overrides, self._from[0], OmegaConfBaseException, ValueError):
                config = to_config(cfg)
        except UnknownSettingError as error:  # given with + or ++, so Hydra did not refuse it
            from klrl.config.explain import wrong_key

            raise wrong_key(error.key, overrides, self._from[0]) from error
        check_all_read(config, given)
        check_objective(config, overrides)
        complete(config)
        return config

    def _merged(self, overrides: Sequence[str]) -> DictConfig:
        # Hydra itself applies all overrides up to the last that sets no value and no choice.
        plain = [_is_value(override) or _is_choice(override) for override in overrides]
        start = max((i for i, known in enumerate(plain) if not known), default=-1) + 1
        chosen = (*overrides[:start], *filter(_is_choice, overrides[start:]))
        try:
            cfg = copy.deepcopy(_composed(chosen, *self._from, self._stamp))
            for override in parse_overrides(filter(_is_value, overrides[start:])):
                if override.is_sweep_override():
                    return compose(overrides, *self._from)
                key, add = override.key_or_group, override.is_force_add()
                OmegaConf.update(cfg, key, override.value(), merge=True, force_add=add)
        except _REFUSALS as error:
            raise_stop(error)
            # Given all overrides, Hydra raises a more precise error.
            return compose(overrides, *self._from)
        return cfg


#: Settings outside any group. Their keys have values, not choices.
_VALUES = frozenset(f.name for f in fields(Ungrouped))
_CHOSEN = frozenset(ALL_GROUPS)


def _is_value(override: str) -> bool:
    """Return whether an override sets a value, as ``kl.coef=1`` or ``seed=0``."""
    if override.startswith("~") or (override.startswith("+") and not override.startswith("++")):
        return False
    key = key_of(override)
    if "/" in key or "@" in key:
        return False
    return "." in key or key in _VALUES


def _is_choice(override: str) -> bool:
    """Return whether an override makes a choice, as ``kl=legacy``."""
    group, _, name = override.partition("=")
    return group in _CHOSEN and re.fullmatch(r"\w+", name) is not None


def job_config(overrides: list[str], config_dir: str | None = None) -> JobConfig:
    """Compose and check one job."""
    return Composer(config_dir).job_config(overrides)


def keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys of overrides."""
    return frozenset(map(key_of, overrides))
