"""How a setting declares its range."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING


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
