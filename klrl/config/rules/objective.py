"""``loss`` and ``advantage`` by the name of one objective; asks what the user typed."""

from __future__ import annotations

from collections.abc import Sequence

from klrl.base.errors import ConfigError
from klrl.config import GroupConfig, JobConfig
from klrl.config.objectives import PRESETS


def check_objective(c: JobConfig, overrides: Sequence[str]) -> None:
    """Refuse the loss of a named objective with another's advantage that nobody chose."""
    words = dict(each.partition("=")[::2] for each in overrides)
    name = words.get("loss", "")
    here = c.advantage.baseline if isinstance(c.advantage, GroupConfig) else None
    named = PRESETS["advantage"].get(name)
    if (
        named is None
        or named.values["baseline"] == here
        or {"advantage", "advantage.baseline"} & set(words)
    ):
        return
    raise ConfigError(
        f"loss={name}: its advantage is advantage={name}, and here it is advantage="
        f"{c.advantage.name}{f' with baseline={here}' if here else ''}; give advantage={name}, or "
        "name another"
    )
