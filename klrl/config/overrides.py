"""Parses overrides: separates a sweep's overrides from its jobs' overrides, and lists the jobs.

The grammar (``a=1,2``, ``a=range(3)``, ``a=glob(*)``) and the order of the jobs are Hydra's.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from klrl.base.errors import ConfigError, raise_stop
from klrl.base.files import expanded
from klrl.config import SWEEP_GROUPS
from klrl.config.choices import ALL_GROUPS

#: A longer name of a job's folder is cut to this many characters. File systems allow 255 bytes.
_LONGEST_NAME = 180


@dataclass(frozen=True)
class SweepOverrides:
    """The overrides of a sweep, separated by purpose."""

    name: str | None  # NAME in ``sweep=NAME``, if given
    folder: str | None  # the value of ``hydra.sweep.dir``, if given
    own: list[str]  # overrides of launcher and search
    job: list[str]  # overrides of the jobs, including those with several values


def key_of(override: str) -> str:
    """Return the key of an override: ``env.kwargs.g`` for ``++env.kwargs.g=1``."""
    return override.lstrip("+~").split("=")[0]


def value_of(override: str) -> str:
    """Return the value of an override, without quotes around it."""
    value = override.partition("=")[2]
    quoted = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
    return value[1:-1] if quoted else value


def is_of_sweep(override: str) -> bool:
    """Return whether an override belongs to a sweep itself, not to its jobs."""
    return key_of(override).split(".")[0] in ("sweep", *SWEEP_GROUPS)


#: A setting of Hydra that a sweep refuses -> the remedy.
_REFUSED = {
    "hydra.run.dir": "a sweep never reads it; give hydra.sweep.dir, or sweep=NAME",
    "hydra.sweep.subdir": "klrl names the jobs' folders by what is swept; drop it",
    "hydra/launcher": "klrl has its own launchers; choose launcher=..., see --help",
    "hydra/sweeper": "klrl has its own searches; choose search=..., see --help",
}


def split_overrides(overrides: Sequence[str]) -> SweepOverrides:
    """Separate a sweep's overrides from its jobs' overrides; refuse settings of Hydra itself."""
    name = folder = None
    own: list[str] = []
    job: list[str] = []
    for override in overrides:
        key, value = key_of(override), value_of(override)
        if key == "sweep":
            name = _checked_name(value)
        elif key == "hydra.sweep.dir":
            folder = value
        elif key == "resume" and value not in ("", "null"):
            raise ConfigError(f"{override}: resumes one run; give it to klrl without -m")
        elif key.startswith("hydra"):
            raise ConfigError(f"{override}: {_REFUSED.get(key, 'a sweep never reads it; drop it')}")
        else:
            (own if is_of_sweep(override) else job).append(override)
    if name is not None and folder is not None:
        raise ConfigError(
            f"hydra.sweep.dir={folder}: sweep={name} sets the folder; drop one of the two"
        )
    _check_swept_once(job)
    return SweepOverrides(name, folder, own, job)


def _check_swept_once(overrides: Sequence[str]) -> None:
    """Refuse to set a swept key again, as in ``kl.coef=0.1,1 kl.coef=0.5``."""
    swept: dict[str, str | None] = {}
    for each in parse(overrides):
        key = each.key_or_group
        if key in swept:
            raise ConfigError(f"{swept[key]} {each.input_line}: give {key} once")
        if each.is_sweep_override():
            swept[key] = each.input_line


def _checked_name(value: str) -> str:
    path = Path(value)
    if "," in value:
        raise ConfigError(f"sweep={value}: give one name, without a comma")
    if not value or path.is_absolute() or ".." in path.parts or value.startswith("~"):
        raise ConfigError(f"sweep={value}: give a name; its folder will be outputs/NAME")
    return value


#: Characters that Hydra reads only in quotes.
_UNREAD = re.compile(r"""[^\w\s/\\+.$%*@?|:,=()\[\]{}'"-]""", re.ASCII)


def quote_paths(overrides: Sequence[str]) -> list[str]:
    """Quote values that are existing paths with characters such as ``=``, ``,`` or ``é``.

    Without quotes Hydra refuses ``actor.init=outputs/base/seed=0``, and reads a comma as a sweep.
    An interpolation in a path, such as ``${seed}``, matches any text.
    """
    quoted = []
    for override in overrides:
        key, _, value = override.partition("=")
        parts = re.split(r"\$\{[^}]*\}", str(expanded(value)))
        special = set("=,()[]{}'") & set("".join(parts)) or _UNREAD.search(value)
        plain = not special or value[:1] in ("'", '"', "[", "{")
        # Path.glob accepts no absolute pattern.
        if not plain and glob.glob("*".join(map(glob.escape, parts))):  # noqa: PTH207
            mark = '"' if "'" in value else "'"
            override = f"{key}={mark}{value}{mark}"
        quoted.append(override)
    return quoted


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra; turn an error of Hydra into a one-line ConfigError."""
    with explained(overrides, None, HydraException):
        return parse_overrides(overrides)


@contextmanager
def explained(
    overrides: Sequence[str], config_dir: str | None, *kinds: type[Exception]
) -> Iterator[None]:
    """Turn errors of these ``kinds``, such as Hydra's errors, into a one-line ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise_stop(error)
        from klrl.config.explain import explain

        raise explain(error, overrides, config_dir) from error


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides with Hydra; raise Hydra's errors unchanged."""
    return [_parsed(override) for override in overrides]


@lru_cache(maxsize=10_000)  # a sweep's jobs share most overrides
def _parsed(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])  # an error names the override
    return parsed


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """List the overrides of each job of a sweep: all combinations; the last key changes fastest."""
    parsed = parse(overrides)
    for override in parsed:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: an interval has no list of values; add search=optuna, or "
                "give values"
            )
    values: dict[str, list[str]] = {}
    with explained(overrides, None, HydraException):
        for each in parsed:
            swept = each.is_sweep_override()
            words = each.sweep_string_iterator() if swept else [each.get_value_element_as_str()]
            values[each.get_key_element()] = [f"{each.get_key_element()}={word}" for word in words]
    return [list(job) for job in itertools.product(*values.values())]


def swept_keys(overrides: Sequence[str]) -> list[str]:
    """List the keys with several values, in the order of the overrides."""
    return [o.get_key_element() for o in parse(overrides) if o.is_sweep_override()]


def job_name(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """Make a folder name from a job's values of the swept keys: ``kl=legacy,seed=1``."""
    parts = [each.lstrip("+") for each in overrides if each.partition("=")[0] in swept]
    name = re.sub(r"[\s/\\'\"]+", "_", ",".join(parts)) or "job"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def check_one_choice(overrides: Sequence[str]) -> None:
    """Refuse ``kl=[legacy,retrieve]``, since Hydra would merge the settings of both choices."""
    for override in overrides:
        group, _, value = override.lstrip("+").partition("=")
        first, *others = [each.strip() for each in value.strip("[]").split(",")]
        if group not in ALL_GROUPS or value[:1] != "[" or not others:
            continue
        raise ConfigError(f"{override}: give one choice, as in {group}={first}")


def check_no_second_choice(overrides: Sequence[str]) -> None:
    """Refuse ``kl=legacy ... kl=retrieve`` on a command line, since Hydra would use the last."""
    given: dict[str, str] = {}
    for override in overrides:
        group = override.lstrip("+").partition("=")[0]
        if group in ALL_GROUPS and given.setdefault(group, override) != override:
            raise ConfigError(f"{given[group]} {override}: give one choice of {group}")
