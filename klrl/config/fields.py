"""Declarations of settings with their ranges, and the base schema of every choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ChoiceConfig:
    """The setting of every choice: its name, the key in :data:`klrl.config.choices.CHOICES`."""

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

    ``whole`` accepts 1e6 as well as 1000000, so the field's type is Any, and ``optional`` says
    whether null is allowed; for typed fields OmegaConf checks that.
    """
    rule = {"ge": ge, "gt": gt, "le": le, "whole": whole, "optional": optional}
    return field(default=MISSING, metadata=rule)


def choice(*allowed: str, optional: bool = False) -> Any:
    """Declare a setting with a closed list of values; ``optional`` says whether null is allowed."""
    return field(default=MISSING, metadata={"allowed": allowed, "optional": optional})


def added(setting: Any, before: Any) -> Any:
    """Declare a setting that older runs do not have.

    Args:
        setting: declared with :func:`number` or :func:`choice`.
        before: the value that keeps the behaviour from before the setting existed. Stored runs
            without the setting are read with this value. A job's identity leaves the setting out
            while it has this value, so that sweeps begun earlier can resume.
    """
    metadata = {**setting.metadata, "added": before}
    return field(default=before, metadata=metadata)
