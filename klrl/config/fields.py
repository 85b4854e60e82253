"""Declarations of settings with their ranges, and the base schema of every choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from klrl.base.text import nearest


class Settings:
    """Settings as dataclasses, which take no name that they do not have: it would be a typo."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set one; an AttributeError names the nearest where there is none of this name."""
        known = getattr(type(self), "__dataclass_fields__", {})
        if name not in known:
            said = nearest(name, known) or f"; it has {', '.join(known)}"
            raise AttributeError(f"{type(self).__name__}.{name}: no such setting{said}")
        super().__setattr__(name, value)


@dataclass
class ChoiceConfig(Settings):
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
    """Declare a setting that older runs do not have; ``before`` keeps their behaviour.

    Stored runs without the setting are read with ``before``. A job's identity leaves the setting
    out while it has this value, so that sweeps begun earlier can resume.
    """
    return field(default=before, metadata={**setting.metadata, "added": before})


@dataclass
class OwnPart(Settings):
    """A part from outside klrl: what it is called, and with what (docs/extending.md).

    ``path``, ``source`` and ``version`` are klrl's to set; see :mod:`klrl.config.own`.
    """

    target: Optional[str] = None  # noqa: UP045
    args: dict[str, Any] = field(default_factory=dict)
    path: Optional[str] = field(default=None, metadata={"free": True})  # noqa: UP045
    source: Optional[str] = None  # noqa: UP045
    version: Optional[str] = None  # noqa: UP045


def own_part() -> Any:
    """Declare a custom part within a group: null, a target, or an :class:`OwnPart`."""
    return added(field(metadata={"own": True}), None)
