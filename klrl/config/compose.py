"""From words to typed jobs: Hydra composes, ``klrl.config.checks`` types. No torch."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError
from klrl.config import (
    GROUPS,
    JobConfig,
    RootConfig,
    conf_dir,
    register_schemas,
)
from klrl.config.catalogue import ALL_GROUPS
from klrl.config.checks import check_names_unset, to_config
from klrl.config.explain import bare_word, explain
from klrl.config.overrides import key_of, parse_overrides, quote_paths
from klrl.config.unread import check_all_read


class Checked(NamedTuple):
    """A job's words and its checked settings."""

    words: list[str]
    config: JobConfig


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
    if args.experimental_rerun:
        raise ConfigError(
            f"--experimental-rerun {args.experimental_rerun}: klrl goes on with resume=outputs/RUN"
        )
    if (args.package or args.resolve) and not (args.cfg or args.info):
        flag = f"--package {args.package}" if args.package else "--resolve"
        raise ConfigError(f"{flag}: only --cfg reads it; add --cfg job, or drop it")
    check_words(args.overrides, args.config_dir)
    check_config_dir(args.config_dir)
    args.given = args.overrides
    args.overrides = quote_paths(allow_env_kwargs(args.overrides))
    return args


def check_words(words: Sequence[str], config_dir: str | None = None) -> None:
    """Refuse a word that sets nothing.

    Raises:
        ConfigError: with the word.
    """
    bare = [word for word in words if "=" not in word and not word.startswith("~")]
    bare += [word for word in words if not key_of(word)]
    if bare:
        raise bare_word(bare[0], config_dir)


def check_config_dir(folder: str | None) -> None:
    """Refuse a folder of choices that is not there."""
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder; give an existing one")


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


#: Hydra lets a ValueError through for kl=null, and YAML's own errors for a broken file.
_REFUSALS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


class Composer:
    """Composes jobs; those that make the same choices are composed by Hydra once.

    Values given beside the choices are merged into a copy of that config, as Hydra merges them
    itself: after all choices, in the order given. That takes a tenth of the time of composing each
    job anew.

    Args:
        config_dir: a folder with the user's own choices.
        config_name: another primary config.
    """

    def __init__(self, config_dir: str | None = None, config_name: str | None = None) -> None:
        self._from = (config_dir, config_name)
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def explained(self, words: Sequence[str]) -> DictConfig:
        """One job's config, every error in one line.

        Raises:
            ConfigError: what Hydra, OmegaConf or YAML refused.
        """
        try:
            return self._merged(words)
        except (*_REFUSALS, OSError) as error:
            raise explain(error, words, self._from[0]) from error

    def _merged(self, words: Sequence[str]) -> DictConfig:
        # What is neither, as ~kl.coef or kl={coef: 1}, is Hydra's own, with all that stands before.
        others = (i for i, word in enumerate(words) if not (_is_value(word) or _is_choice(word)))
        start = max(others, default=-1) + 1
        chosen = (*words[:start], *filter(_is_choice, words[start:]))
        try:
            if chosen not in self._composed:
                self._composed[chosen] = compose(chosen, *self._from)
            cfg = copy.deepcopy(self._composed[chosen])
            for override in parse_overrides(filter(_is_value, words[start:])):
                if override.is_sweep_override():
                    return compose(words, *self._from)
                key, add = override.key_or_group, override.is_force_add()
                OmegaConf.update(cfg, key, override.value(), merge=True, force_add=add)
        except _REFUSALS:
            # Whatever is wrong, Hydra's own message on the whole command line says it best.
            return compose(words, *self._from)
        return cfg


#: Outside any group, a key without a dot is a choice, but for these.
_VALUES = frozenset(f.name for f in fields(RootConfig)) - frozenset(GROUPS)
_CHOSEN = frozenset(ALL_GROUPS)


def _is_value(word: str) -> bool:
    """Whether a word gives a value, as ``kl.coef=1`` and ``seed=0``."""
    if word.startswith("~") or (word.startswith("+") and not word.startswith("++")):
        return False
    key = key_of(word)
    if key.startswith("hydra") or "/" in key or "@" in key:
        return False
    return "." in key or key in _VALUES


def _is_choice(word: str) -> bool:
    """Whether a word makes a choice, as ``kl=legacy``."""
    group, _, name = word.partition("=")
    return group in _CHOSEN and re.fullmatch(r"\w+", name) is not None


def job_config(
    words: list[str], config_dir: str | None = None, config_name: str | None = None
) -> JobConfig:
    """One job's settings, typed and checked, with nothing among its words unread.

    Raises:
        ConfigError: a word or a value is refused.
    """
    return checked_config(words, Composer(config_dir, config_name), config_dir)


def checked_config(words: list[str], composer: Composer, config_dir: str | None) -> JobConfig:
    """The same, with what several jobs share.

    Raises:
        ConfigError: a word or a value is refused.
    """
    cfg = composer.explained(words)
    given = keys(words)
    check_names_unset(given)
    try:
        config = to_config(cfg)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise explain(error, words, config_dir) from error
    check_all_read(config, given)
    return config


def keys(words: Sequence[str]) -> frozenset[str]:
    """The keys that words set."""
    return frozenset(map(key_of, words))
