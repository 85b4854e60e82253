"""Types of settings that OmegaConf lacks. OmegaConf gets ``Any``, and klrl checks the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klrl.config.fields import OwnPart

#: The settings of a group, an instance of the chosen schema.
Group = Any

if TYPE_CHECKING:
    Part = OwnPart  # or null
    Switch = str  # YAML reads a bare false as a boolean
    Values = dict[str, object]
    Whole = int | None
    Words = str | list[str]
else:
    Part = Switch = Whole = Words = Any
    Values = dict[str, Any]
