"""Declarations of settings with their ranges, and the base schema of every choice."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, is_dataclass
from typing import Any, Optional

from omegaconf import MISSING

from klrl.base.text import nearest

#: A declaration stands where a field's value does, whatever its type.
Declaration = Any


class Settings:
    """Settings as dataclasses, which take no name that they do not have: it would be a typo."""

    def __setattr__(self, name: str, value: object) -> None:
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


def setting(value: object, **rule: object) -> Declaration:
    """Declare a setting with the value that a choice gives it; MISSING: the user must give one."""
    return field(default=MISSING, metadata=rule if value is MISSING else {**rule, "value": value})


def number(
    value: object = MISSING,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    whole: bool = False,
    optional: bool = True,
) -> Declaration:
    """Declare a numeric setting with its range.

    ``whole`` accepts 1e6 as well as 1000000 (a field of type Whole), and ``optional`` says
    whether null is allowed; for typed fields OmegaConf checks that.
    """
    return setting(value, ge=ge, gt=gt, le=le, whole=whole, optional=optional)


def choice(
    *allowed: str, value: str | None = None, optional: bool = False, declared_in: str = ""
) -> Declaration:
    """Declare a setting with a closed list of values, of which the first is its own.

    Where null is allowed (``optional``), that is. ``declared_in`` names the file of the list.
    """
    value = value if value or optional else allowed[0]
    where = f" (declared in {declared_in})" if declared_in else ""
    return setting(value, allowed=allowed, optional=optional, where=where)


def added(setting: Declaration, before: object) -> Declaration:
    """Declare a setting that older runs do not have; ``before`` keeps their behaviour.

    Stored runs without the setting are read with ``before``, which is also its value where
    ``setting`` has none. A job's identity leaves the setting
    out while it has this value, so that sweeps begun earlier can resume.
    """
    return field(default=before, metadata={**setting.metadata, "added": before})


def nested_schema(of: Field[object]) -> type | None:
    """The dataclass of settings that a field holds; None for a single setting."""
    made = of.default_factory
    return made if isinstance(made, type) and is_dataclass(made) else None


@dataclass
class OwnPart(Settings):
    """A part from outside klrl: what it is called, and with what (docs/extending.md).

    ``path``, ``source`` and ``version`` are klrl's to set; see :mod:`klrl.config.own`.
    """

    #: package.module:Name, from the current folder or PYTHONPATH; see docs/extending.md
    target: Optional[str] = field(default=None, metadata={"value": MISSING})
    #: its arguments, as in args.x=1; of its defaults, numbers, texts and null are shown
    args: dict[str, Any] = field(default_factory=dict)
    #: a folder to search as well; klrl notes the one where it found the module
    path: Optional[str] = field(default=None, metadata={"free": True})
    #: a digest over its local files, part of the job's identity; klrl's to set
    source: Optional[str] = None
    version: Optional[str] = None  # of its distribution, where it has one; klrl's to set


def own_part() -> Declaration:
    """Declare a custom part within a group: null, a target, or an :class:`OwnPart`."""
    return added(field(metadata={"own": True}), None)
