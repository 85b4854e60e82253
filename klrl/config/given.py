"""An override of the command line, in its parts."""

from __future__ import annotations

import glob
import re
from dataclasses import fields
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from klrl.base.files import expanded
from klrl.config import SWEEP_GROUPS, Ungrouped
from klrl.config.choices import ALL_GROUPS

#: Settings outside any group. Their keys have values, not choices.
VALUES = frozenset(f.name for f in fields(Ungrouped))
#: Dictionaries, in which Hydra requires ``++`` for new keys.
OPEN = re.compile(r"(env\.(template_)?kwargs|launcher\.slurm|\w+\.args|\w+\.own_\w+)[.=]")
#: Characters that Hydra reads only in quotes.
_UNREAD = re.compile(r"""[^\w\s/\\+.$%*@?|:,=()\[\]{}'"-]""", re.ASCII)


class Given(str):
    """An override in Hydra's grammar, read once: ``++env.kwargs.g=1`` has the key env.kwargs.g."""

    kind: str  # "choice", as kl=legacy; "value", as kl.coef=1; "other", which only Hydra can apply
    key: str
    value: str  # without quotes around it

    def __new__(cls, word: str) -> Given:
        """Read an override; write it with ``++`` if it sets a key of a dictionary."""
        given = super().__new__(cls, f"++{word}" if OPEN.match(word) else word)
        left, _, value = given.partition("=")
        given.key = left.lstrip("+~")
        sign = left.removesuffix(given.key)
        marked = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
        given.value = value[1:-1] if marked else value
        plain = sign in ("", "++") and not set("/@") & set(given.key)
        if given.key in ALL_GROUPS and not sign and re.fullmatch(r"\w+", value):
            given.kind = "choice"
        elif plain and ("." in given.key or given.key in VALUES):
            given.kind = "value"
        else:
            given.kind = "other"
        return given

    @property
    def group(self) -> str:
        """The part of the key before the first dot."""
        return self.key.partition(".")[0]

    @property
    def of_sweep(self) -> bool:
        """Whether the override belongs to a sweep itself, not to its jobs."""
        return self.group in ("sweep", *SWEEP_GROUPS)

    @property
    def of_hydra(self) -> bool:
        """Whether the override sets something of Hydra itself, as ``hydra.run.dir``."""
        return self.key.startswith("hydra")

    @property
    def parsed(self) -> Override:
        """The override as Hydra reads it."""
        return _parsed(self)


@lru_cache(maxsize=10_000)  # a sweep's jobs share most overrides
def _parsed(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])  # an error names the override
    return parsed


def quoted(word: str) -> str:
    """Quote the value of an override if it is an existing path with characters as ``=`` or ``é``.

    Without quotes Hydra refuses ``actor.init=outputs/base/seed=0``, and reads a comma as a sweep.
    An interpolation in a path, such as ``${seed}``, matches any text.
    """
    key, _, value = word.partition("=")
    parts = re.split(r"\$\{[^}]*\}", str(expanded(value)))
    special = set("=,()[]{}'") & set("".join(parts)) or _UNREAD.search(value)
    plain = not special or value[:1] in ("'", '"', "[", "{")
    # Path.glob accepts no absolute pattern.
    if plain or not glob.glob("*".join(map(glob.escape, parts))):  # noqa: PTH207
        return word
    mark = '"' if "'" in value else "'"
    return f"{key}={mark}{value}{mark}"
