"""Refuses overrides that a job never reads, and losses such as rloo without their advantage.

To declare that a job does not read a setting, add an entry to ``unread.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.tables import read_table
from klrl.config import CONTROL, LANGUAGE, GroupConfig, JobConfig
from klrl.config.given import Given
from klrl.config.objectives import PRESETS

#: Setting -> some of its values.
Values = Mapping[str, Sequence[object]]


@dataclass(frozen=True)
class Unread:
    """An entry of ``unread.yaml``, whose first lines explain the fields."""

    keys: str
    reason: str
    where: Values = field(default_factory=dict)
    unless: Values = field(default_factory=dict)
    anyway: object = ...
    presets: bool = False

    def applies(self, config: JobConfig) -> bool:
        """Return whether a job never reads the settings ``keys``."""
        there = all(_value(config, key) in values for key, values in self.where.items())
        return there and not any(_value(config, key) in of for key, of in self.unless.items())


def _value(config: JobConfig, setting: str) -> object:
    """Return the value of a job's setting, or ``...`` if the job has no such setting."""
    try:
        return attrgetter(setting)(config)
    except AttributeError:
        return ...


_TABLE = Path(__file__).with_suffix(".yaml")
_RULES = {
    part: [Unread(**entry) for entry in entries] for part, entries in read_table(_TABLE).items()
}
#: domain -> the entries for its jobs
UNREAD = {domain: [*_RULES["both"], *_RULES[domain]] for domain in (CONTROL, LANGUAGE)}


def check_all_read(config: JobConfig, overrides: Iterable[Given]) -> None:
    """Refuse overridden keys, and some settings of YAMLs, that the job never reads."""
    given = sorted({each.key for each in overrides})
    for rule in UNREAD[config.domain]:
        for setting in rule.keys.split():
            named = [key for key in given if f"{key}.".startswith(f"{setting}.")]
            if not (named or rule.presets) or not rule.applies(config):
                continue
            if rule.anyway is ... or _value(config, setting) not in (rule.anyway, ...):
                word = named[0] if named else f"{setting}={_value(config, setting)}"
                raise ConfigError(f"{word}: has no effect: {rule.reason}")


def check_objective(c: JobConfig, overrides: Iterable[Given]) -> None:
    """Refuse ``loss=NAME`` without the advantage NAME, unless the user chose an advantage."""
    given = {each.key: each.value for each in overrides}
    name = given.get("loss", "")
    here = c.advantage.baseline if isinstance(c.advantage, GroupConfig) else None
    named = PRESETS["advantage"].get(name)
    if (
        named is None
        or named.values["baseline"] == here
        or {"advantage", "advantage.baseline"} & set(given)
    ):
        return
    raise ConfigError(
        f"loss={name}: goes with advantage={name}, but the job has advantage={c.advantage.name}"
        f"{f' with baseline={here}' if here else ''}; add advantage={name}, or name the advantage "
        "that you want"
    )
