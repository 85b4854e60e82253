"""From words to checked jobs: Hydra composes, :mod:`klrl.checks` types. Nothing runs, no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from klrl.checks import check_all_read, to_config, to_settings
from klrl.config import (
    SWEEP_GROUPS,
    Config,
    LanguageConfig,
    LauncherConfig,
    SearchConfig,
    conf_dir,
    register_schemas,
)
from klrl.errors import ConfigError
from klrl.hints import bare_word, explain
from klrl.preflight import check_machine
from klrl.preflight.install import require
from klrl.sweep.words import quote_paths

#: name (empty until a sweep gives one), words, checked settings
Checked = tuple[str, list[str], Config | LanguageConfig]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags, and the words beside them ready for its grammar.

    Args:
        argv: the command line.

    Returns:
        ``overrides``: the words, with ``++`` where a dictionary is open and paths quoted;
        ``given``: as they came; Hydra's flags.

    Raises:
        ConfigError: an unknown flag, a word that is no setting, a folder that is not there.
    """
    parser = get_args_parser()
    args, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; settings are KEY=VALUE, see --help")
    if args.config_path:
        raise ConfigError("--config-path: klrl's own settings are always read; use --config-dir")
    bare = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    if bare:
        raise bare_word(bare[0], args.config_dir)
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: no such folder; give an existing one")
    args.given = args.overrides
    args.overrides = quote_paths(allow_env_kwargs(args.overrides))
    return args


def allow_env_kwargs(overrides: Sequence[str]) -> list[str]:
    """Let ``env.kwargs.g=9.81`` add a key: Hydra wants ``++`` where a dictionary is open."""
    open_keys = ("env.kwargs.", "env.kwargs=")
    return [f"++{word}" if word.startswith(open_keys) else word for word in overrides]


def compose(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> DictConfig:
    """Compose one job's config, without running anything.

    Args:
        overrides: words as on the command line.
        config_dir: a folder with the user's own choices.
        config_name: another primary config; default ``config``.
    """
    register_schemas()
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return hydra.compose(config_name or "config", overrides=[*overrides, *extra])


def explained(
    words: list[str], config_dir: str | None = None, config_name: str | None = None
) -> DictConfig:
    """The same with every error in one line.

    Raises:
        ConfigError: what Hydra, OmegaConf or YAML refused.
    """
    try:
        return compose(words, config_dir, config_name)
    # Hydra lets a ValueError through for kl=null, and YAML's own errors for a broken file.
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise explain(error, words, config_dir) from error


def job_config(
    words: list[str], config_dir: str | None = None, config_name: str | None = None
) -> Config | LanguageConfig:
    """One job's settings, typed and checked, with nothing among its words unread.

    Raises:
        ConfigError: a word or a value is refused.
    """
    cfg = explained(words, config_dir, config_name)
    try:
        config = to_config(cfg)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise explain(error, words, config_dir) from error
    check_all_read(config, keys(words))
    return config


def keys(words: Sequence[str]) -> frozenset[str]:
    """The keys that words set."""
    return frozenset(word.lstrip("+~").split("=")[0] for word in words)


def check_jobs(jobs: Sequence[list[str]], args: argparse.Namespace) -> list[Checked]:
    """Check every job before the first one runs; the machine once per kind of job.

    Raises:
        ConfigError: of the first job that cannot run.
    """
    checked = [("", job, job_config(job, args.config_dir, args.config_name)) for job in jobs]
    seen = set()
    for _, job, config in checked:
        parts = ("env", "actor", "collector", "device", "reference", "logger")
        machine = repr([getattr(config, part) for part in parts])
        if machine not in seen:
            check_machine(config, keys(job))
        seen.add(machine)
    return checked


def sweep_settings(
    own: Sequence[str], args: argparse.Namespace
) -> tuple[LauncherConfig, SearchConfig]:
    """Where a sweep's jobs run, and what chooses them.

    Args:
        own: words of the groups ``launcher`` and ``search``.
        args: Hydra's flags.

    Raises:
        ConfigError: a word is refused, or a package is missing.
    """
    words = list(own)
    for word in words:
        if word.partition("=")[0] in SWEEP_GROUPS and "," in word:
            raise ConfigError(f"{word}: a sweep has one {word.partition('=')[0]}; give one")
    cfg = explained(words, args.config_dir, "sweep")
    parts: dict[str, Any] = to_settings(cfg, SWEEP_GROUPS)
    launcher, search = parts["launcher"], parts["search"]
    packages = {"joblib": "joblib", "submitit": "submitit", "ray": "ray"}
    if launcher.name in packages:
        package = packages[launcher.name]
        require(package, f"launcher={launcher.name}", f"pip install 'klrl[{package}]'")
    if search.name == "optuna":
        require("optuna", "search=optuna", "pip install 'klrl[optuna]'")
    for group, part in parts.items():
        if f"{group}.name" in keys(words):
            raise ConfigError(f"{group}.name: set by the choice; choose with {group}={part.name}")
    return launcher, search
