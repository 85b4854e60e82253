"""How a setting declares its range, and what every choice of a group has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ChoiceConfig:
    """What every choice has: its own name, as :data:`klrl.config.choices.CHOICES` has it."""

    name: str = field(default=MISSING, kw_only=True)


def number(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    whole: bool = False,
    optional: bool = True,
) -> Any:
    """Declare a numeric setting with its range.

    ``whole`` accepts 1e6 as well as 1000000 and so needs a field of type Any, which says for itself
    whether null is a value (``optional``); typed fields leave that to OmegaConf.
    """
    rule = {"ge": ge, "gt": gt, "le": le, "whole": whole, "optional": optional}
    return field(default=MISSING, metadata=rule)


def choice(*allowed: str) -> Any:
    """Declare a setting with a closed list of values."""
    return field(default=MISSING, metadata={"allowed": allowed, "optional": False})


def added(setting: Any, before: Any) -> Any:
    """Declare a setting that older runs do not have.

    Args:
        setting: what :func:`number` or :func:`choice` declared.
        before: the value that does what was done before the setting was there. Stored runs
            without it are read with this value, and with this value it is no part of a job's
            identity: sweeps that were begun before it go on.
    """
    metadata = {**setting.metadata, "added": before}
    return field(default=before, metadata=metadata)
