"""Which settings a resumed run may change, and its config with those changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, first_line
from klrl.config import JobConfig
from klrl.config.checks import to_config
from klrl.config.overrides import key_of
from klrl.config.stored import typed
from klrl.runs.find import check_not_running, find_run

#: What may differ from the run that is resumed; all else defines it.
CHANGEABLE = ("frames", "device", "threads", "eval.every", "eval.episodes", "checkpoint.every")


def resumed_config(path: str, overrides: Sequence[str]) -> tuple[Path, JobConfig]:
    """The folder and the settings of a run to go on with.

    Args:
        path: the run folder.
        overrides: ``key=value`` words; only the keys of :data:`CHANGEABLE`.

    Raises:
        ConfigError: no run or checkpoint there, it is still running, or a word may not change.
    """
    run = find_run(path, "resume")
    check_not_running(run)
    return run, stored_config(run, overrides)


def stored_config(
    run: Path, overrides: Sequence[str] = (), *, changeable: Sequence[str] = CHANGEABLE
) -> JobConfig:
    """Read ``.hydra/config.yaml`` of a run back into the typed config.

    Args:
        run: the run folder.
        overrides: ``key=value`` words.
        changeable: the keys that they may have, or keys above theirs.

    Raises:
        ConfigError: a word may not change, or the file is of another version of klrl.
    """
    try:
        cfg = typed(_settings(run))
    except (ConfigError, OmegaConfBaseException) as error:
        text = first_line(error)
        raise ConfigError(f"{run}: {text}; the run was made by another version of klrl") from error
    for word in overrides:
        _change(cfg, word, changeable)
    return to_config(cfg)


def _settings(run: Path) -> dict[str, Any]:
    """As they are stored; interpolations in them are resolved."""
    try:
        cfg = OmegaConf.load(run / ".hydra" / "config.yaml")
    # OmegaConf says OSError of a file that holds a single number.
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f".hydra/config.yaml cannot be read ({first_line(error)})") from error
    settings = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(settings, dict):
        raise ConfigError(".hydra/config.yaml holds no settings")
    return {str(key): value for key, value in settings.items()}


def _change(cfg: DictConfig, word: str, changeable: Sequence[str]) -> None:
    key = key_of(word)
    kept = not any(key == may or key.startswith(f"{may}.") for may in changeable)
    if kept or word.startswith("~"):
        raise ConfigError(
            f"{word}: a resumed run keeps it; only {', '.join(changeable)} may change"
        )
    try:
        value = OverridesParser.create().parse_override(word).value()
        OmegaConf.update(cfg, key, value, merge=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{word}: {first_line(error)}") from error
