"""The words of a sweep's command line: which are the sweep's own, and the jobs that the rest makes.

Grammar and order of the jobs are Hydra's (``a=1,2``, ``a=range(3)``, ``a=glob(*)``).
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from klrl.base.errors import ConfigError
from klrl.config import SWEEP_GROUPS
from klrl.config.explain import explain

#: File systems allow 255 bytes.
_LONGEST_NAME = 180


@dataclass(frozen=True)
class SweepWords:
    """A sweep's command line in its parts.

    Attributes:
        name: of ``sweep=NAME``; None where a new folder shall be made.
        folder: of ``hydra.sweep.dir``.
        own: words of the launcher and the search.
        job: words of the jobs, swept ones among them.
    """

    name: str | None
    folder: str | None
    own: list[str]
    job: list[str]


def key_of(word: str) -> str:
    """``++env.kwargs.g=1`` -> ``env.kwargs.g``."""
    return word.lstrip("+~").split("=")[0]


def value_of(word: str) -> str:
    """What stands behind the ``=``, without the quotes around it."""
    value = word.partition("=")[2]
    quoted = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
    return value[1:-1] if quoted else value


def is_own(word: str) -> bool:
    """Whether a word is about how jobs are run, not about what they compute."""
    return key_of(word).split(".")[0] in ("sweep", *SWEEP_GROUPS)


def split_words(overrides: Sequence[str]) -> SweepWords:
    """Take the sweep's own words from those of its jobs.

    Raises:
        ConfigError: a word that only Hydra's own sweeps read.
    """
    name = folder = None
    own: list[str] = []
    job: list[str] = []
    for word in overrides:
        key, value = key_of(word), value_of(word)
        if key == "sweep":
            name = _checked_name(value)
        elif key == "hydra.sweep.dir":
            folder = value
        elif key == "hydra.run.dir":
            raise ConfigError(f"{key}: a sweep never reads it; give hydra.sweep.dir, or sweep=NAME")
        elif key == "hydra.sweep.subdir":
            raise ConfigError(f"{key}: klrl names the jobs' folders by what is swept; drop it")
        elif key in ("hydra/launcher", "hydra/sweeper"):
            mine = "launcher" if key.endswith("launcher") else "search"
            raise ConfigError(f"{word}: klrl has its own; choose {mine}=..., see --help")
        elif key.startswith("hydra"):
            raise ConfigError(f"{word}: a sweep never reads it; drop it")
        else:
            (own if is_own(word) else job).append(word)
    if name is not None and folder is not None:
        raise ConfigError(f"hydra.sweep.dir={folder}: sweep={name} says where; drop one of the two")
    return SweepWords(name, folder, own, job)


def _checked_name(value: str) -> str:
    path = Path(value)
    if "," in value:
        raise ConfigError(f"sweep={value}: give one name, without a comma")
    if not value or path.is_absolute() or ".." in path.parts or value.startswith("~"):
        raise ConfigError(f"sweep={value}: give a name; its folder will be outputs/NAME")
    return value


def quote_paths(words: Sequence[str]) -> list[str]:
    """Quote values that are paths with ``=`` or ``,`` in them, as job folders have.

    ``actor.init=outputs/base/seed=0`` would else be refused by Hydra's grammar, and with a comma be
    taken for a sweep. Parts like ``${seed}`` may be anything.
    """
    return [_quoted(word) for word in words]


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    if not set("=,") & set(value) or value[:1] in ("'", '"', "[", "{"):
        return word
    parts = re.split(r"\$\{[^}]*\}", str(Path(value).expanduser()))
    pattern = "*".join(glob.escape(part) for part in parts)
    # Not Path.glob: it takes no absolute pattern.
    return f"{key}='{value}'" if glob.glob(pattern) else word  # noqa: PTH207


def parse(words: Sequence[str]) -> list[Override]:
    """Hydra's reading of the words.

    Raises:
        ConfigError: a word outside its grammar.
    """
    try:
        return parse_overrides(words)
    except HydraException as error:
        raise explain(error, words, None) from error


def parse_overrides(words: Iterable[str]) -> list[Override]:
    """The same with Hydra's own errors; the jobs of a sweep share most of their words."""
    return [_parsed(word) for word in words]


@lru_cache(maxsize=10_000)
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def expand(words: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep: every combination, the last word changing fastest.

    Raises:
        ConfigError: a word outside Hydra's grammar, or an interval without ``search=optuna``.
    """
    parsed = parse(words)
    for override in parsed:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: an interval has no list of values; add search=optuna, or "
                "give values"
            )
    try:
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    except HydraException as error:
        raise explain(error, words, None) from error


def swept_keys(words: Sequence[str]) -> list[str]:
    """Keys with several values, in the order given."""
    return [o.get_key_element() for o in parse(words) if o.is_sweep_override()]


def job_name(words: Sequence[str], swept: Sequence[str]) -> str:
    """A readable folder name: ``kl=legacy,kl.coef=0.1,seed=1``.

    Args:
        words: of one job.
        swept: keys with several values; without any, the job is called ``job``.
    """
    parts = [word.lstrip("+") for word in words if word.partition("=")[0] in swept]
    name = re.sub(r"[\s/\\'\"]+", "_", ",".join(parts)) or "job"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
