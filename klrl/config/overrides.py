"""Parses a command line, once: into flags and overrides, which every later step reads.

The grammar (``a=1,2``, ``a=range(3)``, ``a=glob(*)``) and the order of the jobs are Hydra's.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, raise_stop
from klrl.base.text import nearest_option
from klrl.config import ALL_CHOICES
from klrl.config.checks import UnknownSettingError
from klrl.config.choices import ALL_GROUPS, NAME, SET_BY_KLRL
from klrl.config.given import OPEN, VALUES, Given, quoted

#: A longer name of a job's folder is cut to this many characters. File systems allow 255 bytes.
_LONGEST_NAME = 180


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line into flags and ``overrides``, a list of :class:`Given`."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--verbose", "-v", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    try:
        args, unknown = parser.parse_known_intermixed_args([_without_dashes(each) for each in argv])
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see --help") from error
    if unknown:
        meant = nearest_option(unknown[0], parser.format_usage() + "--version")
        remedy = meant or "; settings are KEY=VALUE"
        raise ConfigError(f"{unknown[0]}: no such flag{remedy}, see --help")
    given: dict[str, str] = {}
    for each in map(Given, args.overrides):  # Hydra would use the last choice
        if each.key in ALL_GROUPS and given.setdefault(each.key, each) != each:
            raise ConfigError(f"{given[each.key]} {each}: give one choice of {each.key}")
    args.overrides = read(args.overrides, args.config_dir)
    return args


def _without_dashes(argument: str) -> str:
    """Turn ``--kl.coef=1``, as wandb agents write it, into ``kl.coef=1``; keep other arguments."""
    given = Given(argument.removeprefix("--"))
    known = given.group in {*VALUES, *ALL_GROUPS, "sweep", "hydra"}
    return given if known and "=" in argument else argument


def flags(config_dir: str | None) -> list[str]:
    """Return the flags of a command line that :func:`parse_args` reads as this folder."""
    return ["--config-dir", config_dir] if config_dir else []


def read(arguments: Sequence[str], config_dir: str | None) -> list[Given]:
    """Read the overrides of a command line; refuse other arguments and a missing ``config_dir``."""
    for each in arguments:
        if not Given(each).key or ("=" not in each and not each.startswith("~")):
            from klrl.config.explain import not_an_override

            raise not_an_override(each, config_dir)
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder; give an existing one")
    return parse(map(quoted, arguments), config_dir)


def parse(words: Iterable[str], config_dir: str | None = None) -> list[Given]:
    """Parse overrides; refuse what is wrong in itself, whatever the job."""
    given = [each if isinstance(each, Given) else Given(each) for each in words]
    for each in given:
        _check(each)
    with explained(given, config_dir):
        for each in given:
            if each.group not in ("resume", "sweep") and not each.of_hydra:
                _ = each.parsed
    return given


def _check(given: Given) -> None:
    key, value = given.key, given.value
    group, *names = key.split(".")
    if given.startswith("~") and not OPEN.match(given[1:]):
        raise ConfigError(f"{given}: cannot be deleted; set a value, or drop it")
    first, *others = [each.strip() for each in value.strip("[]").split(",")]
    if key in ALL_GROUPS and value[:1] == "[" and others:  # Hydra would merge the settings of all
        raise ConfigError(f"{given}: give one choice, as in {key}={first}")
    if group in ALL_CHOICES and names == [NAME]:
        raise ConfigError(f"{key}: set by the choice; choose with {group}=...")
    users = {"args", "kwargs"}.intersection(names)  # dictionaries with the user's own names
    if group in ALL_CHOICES and not users and SET_BY_KLRL.intersection(names):
        raise ConfigError(f"{key}: klrl sets it; drop it")


#: Errors of Hydra for a wrong override or file: ValueError for kl=null, OverflowError for an
#: integer too large for a float, RecursionError for a YAML file that includes itself, TypeError
#: for shuffle(1).
REFUSALS = (
    *(HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError),
    *(OverflowError, RecursionError, TypeError),
)


@contextmanager
def explained(
    given: Sequence[Given], config_dir: str | None, kinds: tuple[type[Exception], ...] = REFUSALS
) -> Iterator[None]:
    """Turn errors of these ``kinds``, such as Hydra's errors, into a one-line ConfigError."""
    try:
        yield
    except kinds as error:
        if isinstance(error, ConfigError) and not isinstance(error, UnknownSettingError):
            raise
        raise_stop(error)
        from klrl.config.explain import explain

        raise explain(error, given, config_dir) from error


@dataclass(frozen=True)
class Separated:
    """The overrides of a command line, separated by purpose."""

    name: str | None  # NAME in ``sweep=NAME``, if given
    folder: str | None  # the value of ``hydra.sweep.dir``, or of a run's ``hydra.run.dir``
    own: list[Given]  # overrides of launcher and search
    job: list[Given]  # overrides of the jobs, including those with several values

    @property
    def path(self) -> str | None:
        """The folder that ``folder`` or ``name`` gives; None for a new one."""
        return self.folder or (str(Path("outputs") / self.name) if self.name else None)


#: A setting of Hydra that a sweep refuses -> the remedy.
_REFUSED = {
    "hydra.run.dir": "a sweep never reads it; give hydra.sweep.dir, or sweep=NAME",
    "hydra.sweep.dir": "a single run never reads it; give hydra.run.dir",
    "hydra.sweep.subdir": "klrl names the jobs' folders by what is swept; drop it",
    "hydra/launcher": "klrl has its own launchers; choose launcher=..., see --help",
    "hydra/sweeper": "klrl has its own searches; choose search=..., see --help",
}


def separate(given: Sequence[Given], *, multirun: bool) -> Separated:
    """Separate a sweep's overrides from its jobs' overrides; refuse settings of Hydra itself."""
    name = folder = None
    own: list[Given] = []
    job: list[Given] = []
    for each in given:
        if each.of_sweep and not multirun:
            raise ConfigError(f"{each}: only a sweep reads it; add -m, or drop it")
        if each.key == "sweep":
            name = _checked_name(each.value)
        elif each.key == ("hydra.sweep.dir" if multirun else "hydra.run.dir"):
            folder = None if each.value in ("", "null") else each.value
        elif each.key == "resume" and each.value not in ("", "null"):
            raise ConfigError(f"{each}: resumes one run; give it to klrl without -m")
        elif each.of_hydra:
            raise ConfigError(f"{each}: {_REFUSED.get(each.key, 'klrl never reads it; drop it')}")
        else:
            (own if each.of_sweep else job).append(each)
    if name is not None and folder is not None:
        raise ConfigError(
            f"hydra.sweep.dir={folder}: sweep={name} sets the folder; drop one of the two"
        )
    if multirun:
        _check_swept_once(job)
    return Separated(name, folder, own, job)


def _check_swept_once(given: Sequence[Given]) -> None:
    """Refuse to set a swept key again, as in ``kl.coef=0.1,1 kl.coef=0.5``."""
    swept: dict[str, str | None] = {}
    for each in given:
        if each.key in swept:
            raise ConfigError(f"{swept[each.key]} {each}: give {each.key} once")
        if each.parsed.is_sweep_override():
            swept[each.key] = each


def _checked_name(value: str) -> str:
    path = Path(value)
    if "," in value:
        raise ConfigError(f"sweep={value}: give one name, without a comma")
    if not value or path.is_absolute() or ".." in path.parts or value.startswith("~"):
        raise ConfigError(f"sweep={value}: give a name; its folder will be outputs/NAME")
    return value


def expand(given: Sequence[Given]) -> list[list[Given]]:
    """List the overrides of each job of a sweep: all combinations; the last key changes fastest."""
    for each in given:
        if each.parsed.is_sweep_override() and not each.parsed.is_discrete_sweep():
            raise ConfigError(
                f"{each}: an interval has no list of values; add search=optuna, or give values"
            )
    values: dict[str, list[str]] = {}
    with explained(given, None):  # range(1,10,0) and glob(*) fail only here
        for parsed in (each.parsed for each in given):
            key, swept = parsed.get_key_element(), parsed.is_sweep_override()
            words = parsed.sweep_string_iterator() if swept else [parsed.get_value_element_as_str()]
            values[key] = [f"{key}={word}" for word in words]
    return [parse(job) for job in itertools.product(*values.values())]


def swept_keys(given: Sequence[Given]) -> list[str]:
    """List the keys with several values, in the order of the overrides."""
    return [each.key for each in given if each.parsed.is_sweep_override()]


def job_name(given: Sequence[Given], swept: Sequence[str]) -> str:
    """Make a folder name from a job's values of the swept keys: ``kl=legacy,seed=1``."""
    parts = [each.lstrip("+") for each in given if each.key in swept]
    name = re.sub(r"[\s/\\'\"]+", "_", ",".join(parts)) or "job"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
