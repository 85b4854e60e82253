"""Settings that a job never reads, each with the reason; giving one of them is refused.

To add one: an entry of ``unread.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.tables import entry_of, read_table
from klrl.config import CONTROL, LANGUAGE, JobConfig

#: Setting -> some of its values.
Values = Mapping[str, Sequence[object]]


@dataclass(frozen=True)
class Unread:
    """A rule on settings or whole groups; what its entries say stands at the top of the YAML."""

    keys: str
    reason: str
    where: Values = field(default_factory=dict)
    unless: Values = field(default_factory=dict)
    anyway: object = ...

    def applies(self, config: JobConfig) -> bool:
        """Whether a job never reads them; asked where one was given."""
        there = all(_value(config, key) in values for key, values in self.where.items())
        return there and not any(_value(config, key) in of for key, of in self.unless.items())


def _value(config: JobConfig, setting: str) -> object:
    """A setting of a job; what no YAML holds where its choice does not have it."""
    try:
        return attrgetter(setting)(config)
    except AttributeError:
        return ...


_TABLE = Path(__file__).with_suffix(".yaml")
_RULES = {
    part: [entry_of(Unread, _TABLE, entry) for entry in entries]
    for part, entries in read_table(_TABLE, "both", CONTROL, LANGUAGE).items()
}
#: domain -> the rules of its jobs
UNREAD = {domain: [*_RULES["both"], *_RULES[domain]] for domain in (CONTROL, LANGUAGE)}


def check_all_read(config: JobConfig, overridden: Iterable[str]) -> None:
    """Refuse an override, given by its key, that the chosen composition never reads."""
    given = sorted(overridden)
    for rule in UNREAD[config.domain]:
        for setting in rule.keys.split():
            named = [key for key in given if f"{key}.".startswith(f"{setting}.")]
            if not named or not rule.applies(config):
                continue
            if rule.anyway is ... or attrgetter(setting)(config) != rule.anyway:
                raise ConfigError(f"{named[0]}: nothing reads it here: {rule.reason}")
