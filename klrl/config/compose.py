"""From words to checked jobs: Hydra composes, :mod:`klrl.config.checks` types. Nothing runs, no torch."""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError
from klrl.base.live import LiveLine
from klrl.config import (
    GROUPS,
    SWEEP_GROUPS,
    JobConfig,
    LauncherConfig,
    RootConfig,
    SearchConfig,
    conf_dir,
    register_schemas,
)
from klrl.config.catalogue import ALL_GROUPS
from klrl.config.checks import check_all_read, check_names_unset, to_config, to_settings
from klrl.config.explain import bare_word, explain
from klrl.config.overrides import key_of, parse_overrides, quote_paths
from klrl.runs.machine import require
from klrl.runs.preflight import check_machine


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


def check_jobs(jobs: Sequence[list[str]], args: argparse.Namespace) -> list[Checked]:
    """Check every job before the first one runs; the machine once per kind of job.

    Raises:
        ConfigError: of the first job that cannot run.
    """
    composer = Composer(args.config_dir, args.config_name)
    checked: list[Checked] = []
    with checking(len(jobs)) as tell:
        for job in jobs:
            config = checked_config(job, composer, args.config_dir)
            checked.append(Checked(job, config))
            tell(len(checked))
    seen = set()
    for each in checked:
        parts = ("env", "actor", "collector", "device", "reference", "logger")
        machine = repr([getattr(each.config, part) for part in parts])
        if machine not in seen:
            check_machine(each.config, keys(each.words))
        seen.add(machine)
    return checked


#: Fewer jobs are checked without a word.
_MANY = 20


@contextmanager
def checking(jobs: int, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """Tell how far the checking of many jobs is, once it has taken a second.

    Yields:
        A function of the number of jobs that were checked.
    """
    stream = stream or sys.stderr
    line = LiveLine(stream)
    said, first = time.monotonic(), True

    def tell(done: int) -> None:
        nonlocal said, first
        now = time.monotonic()
        pause = 1.0 if first else 0.2 if line.live else 5.0
        if jobs < _MANY or now - said < pause:
            return
        said, first = now, False
        text = f"checking jobs: {done:,}/{jobs:,}"
        if line.live:
            line.show(text)
        else:
            line.say(text)

    yield tell
    line.clear()


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
    cfg = Composer(args.config_dir, "sweep").explained(words)
    check_names_unset(keys(words))
    parts: dict[str, Any] = to_settings(cfg, SWEEP_GROUPS)
    launcher, search = parts["launcher"], parts["search"]
    packages = {"joblib": "joblib", "submitit": "submitit", "ray": "ray"}
    if launcher.name in packages:
        package = packages[launcher.name]
        require(package, f"launcher={launcher.name}", f"pip install 'klrl[{package}]'")
    if search.name == "optuna":
        require("optuna", "search=optuna", "pip install 'klrl[optuna]'")
    return launcher, search
