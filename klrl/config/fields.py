"""Functions that declare settings with their ranges, and the base classes of schemas."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, is_dataclass
from typing import Any, Optional

from omegaconf import MISSING

from klrl.base.text import nearest

#: Any, since a declaration is assigned to fields of all types.
Declaration = Any


class Settings:
    """Base class for dataclasses of settings; refuses to set an attribute that is not a field."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field; for an unknown name, raise an AttributeError that suggests a field."""
        known = getattr(type(self), "__dataclass_fields__", {})
        if name not in known:
            said = nearest(name, known) or f"; it has {', '.join(known)}"
            raise AttributeError(f"{type(self).__name__}.{name}: no such setting{said}")
        super().__setattr__(name, value)


@dataclass
class ChoiceConfig(Settings):
    """Base class for the settings of a choice; ``name`` is the choice's name in its group."""

    name: str = field(default=MISSING, kw_only=True)


def setting(value: object, **rule: object) -> Declaration:
    """Declare a setting with a default value; with MISSING, the user must give a value."""
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

    ``whole``: an integer that may be written as 1e6, in a field of type Whole. ``optional``: null
    is allowed, unless OmegaConf refuses it for the field's type.
    """
    return setting(value, ge=ge, gt=gt, le=le, whole=whole, optional=optional)


def choice(
    *allowed: str, value: str | None = None, optional: bool = False, declared_in: str = ""
) -> Declaration:
    """Declare a setting whose value is one of a list.

    The default is ``value``, else null if ``optional``, else the first of the list. ``declared_in``
    is the file with the list, for error messages.
    """
    value = value if value or optional else allowed[0]
    where = f" (declared in {declared_in})" if declared_in else ""
    return setting(value, allowed=allowed, optional=optional, where=where)


def added(setting: Declaration, before: object) -> Declaration:
    """Declare a setting that earlier versions of klrl lacked; ``before`` keeps their behaviour.

    Stored runs without the setting get ``before``. So do new runs, if ``setting`` has no default.
    A job's identity omits the setting if its value is ``before``, so that old sweeps can resume.
    """
    return field(default=before, metadata={**setting.metadata, "added": before})


def nested_schema(of: Field[object]) -> type | None:
    """Return the dataclass of a field with nested settings; None for a single setting."""
    made = of.default_factory
    return made if isinstance(made, type) and is_dataclass(made) else None


@dataclass
class OwnPart(Settings):
    """The settings of a custom part: the user's class or function (docs/extending.md).

    klrl sets ``path``, ``source`` and ``version``; see :mod:`klrl.config.own`.
    """

    #: package.module:Name, from the current folder or PYTHONPATH; see docs/extending.md
    target: Optional[str] = field(default=None, metadata={"value": MISSING})
    #: arguments of the target, as in args.x=1; its default numbers, texts and nulls are shown too
    args: dict[str, Any] = field(default_factory=dict)
    #: a further folder to search; klrl stores the folder in which it found the module
    path: Optional[str] = field(default=None, metadata={"free": True})
    #: a digest over the module's local files, part of the job's identity; set by klrl
    source: Optional[str] = None
    version: Optional[str] = None  # version of the module's distribution, if any; set by klrl


def own_part() -> Declaration:
    """Declare a setting for a custom part: null, a target, or an :class:`OwnPart`."""
    return added(field(metadata={"own": True}), None)
