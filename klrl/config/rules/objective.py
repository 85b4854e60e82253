"""``loss`` and ``advantage`` by the name of one objective; asks what the user typed."""

from __future__ import annotations

from collections.abc import Sequence

from klrl.base.errors import ConfigError
from klrl.config import GroupConfig, JobConfig

#: Presets of the loss that name an objective -> the baseline that it is published with; the preset
#: of the advantage has the same name.
_OBJECTIVES = {
    "grpo": "normalized",
    "dr_grpo": "mean",
    "dapo": "normalized",
    "rloo": "leave_one_out",
}


def check_objective(c: JobConfig, overrides: Sequence[str]) -> None:
    """Refuse the loss of a named objective with another's advantage that nobody chose."""
    words = dict(each.partition("=")[::2] for each in overrides)
    name = words.get("loss", "")
    due = _OBJECTIVES.get(name)
    here = c.advantage.baseline if isinstance(c.advantage, GroupConfig) else None
    if due in (None, here) or {"advantage", "advantage.baseline"} & set(words):
        return
    raise ConfigError(
        f"loss={name}: its advantage is advantage={name}, and here it is advantage="
        f"{c.advantage.name}{f' with baseline={here}' if here else ''}; give advantage={name}, or "
        "name another"
    )
