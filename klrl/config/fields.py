"""The types of settings with their ranges, and the base classes of schemas. pydantic checks both.

A setting is declared once, as ``coef: NonNegative = 0.1``; :mod:`klrl.config.checks` makes schemas
from values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, is_dataclass
from typing import Annotated, Any, Literal

import pydantic
from omegaconf import MISSING
from pydantic import AfterValidator, BeforeValidator, ConfigDict, SkipValidation

from klrl.base.text import nearest


class Settings:
    """Base class for dataclasses of settings; refuses to set an attribute that is not a field."""

    __pydantic_config__ = ConfigDict(
        extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True
    )

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


def setting(value: object, **marks: object) -> Any:
    """Declare a setting with marks, or with a list or dictionary as its default value.

    ``added=True``: earlier versions of klrl lacked the setting, and the default keeps their
    behaviour. A job's identity omits it at its default, so that old sweeps can resume.
    ``free=True``: the setting changes no result. ``own=True``: it holds custom parts.
    """
    return field(default_factory=lambda: copy.copy(value), metadata=marks)


def nested_schema(of: Field[object]) -> type | None:
    """Return the dataclass of a field with nested settings; None for a single setting."""
    made = of.default_factory
    return made if isinstance(made, type) and is_dataclass(made) else None


def _no_switch(value: object) -> object:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise ValueError("give a number")
    return value


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("has no value; give one")
    return value


def one_of(allowed: Sequence[str], declared_in: str) -> AfterValidator:
    """Require one value of a list, which the file ``declared_in`` declares."""

    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"choose one of {', '.join(allowed)} (declared in {declared_in})")
        return value

    return AfterValidator(check)


Number = Annotated[float, BeforeValidator(_no_switch)]
NonNegative = Annotated[Number, pydantic.Field(ge=0)]
Positive = Annotated[Number, pydantic.Field(gt=0)]
Share = Annotated[Number, pydantic.Field(ge=0, le=1)]
#: A whole number, which may be written as 1e6 and fits into int64.
Whole = Annotated[int, BeforeValidator(_no_switch), pydantic.Field(lt=2**63)]
Natural = Annotated[Whole, pydantic.Field(ge=0)]
Count = Annotated[Whole, pydantic.Field(ge=1)]
Copies = Annotated[Count, pydantic.Field(le=2**16)]  # of an environment, in memory
Values = dict[str, Any]
#: A path. An empty one, as from an unset shell variable, would mean the current folder.
Place = Annotated[str, AfterValidator(_not_empty)]
#: One name or several; the rules of the setting check them.
Words = Annotated[str | list[str], SkipValidation]
#: The steps whose KL a target counts: step (control), token (mean) or sequence (sum).
Unit = Literal["step", "token", "sequence"]
#: ``learner.compile``. YAML reads a bare false as a boolean.
Compile = Annotated[
    Literal["auto", "false", "jit", "aot", "kernel"],
    BeforeValidator(lambda value: "false" if value is False else value),
]


@dataclass
class OwnPart(Settings):
    """The settings of a custom part: the user's class or function (docs/extending.md).

    klrl sets ``path``, ``source`` and ``version``; see :mod:`klrl.config.own`.
    """

    #: package.module:Name, from the current folder or PYTHONPATH; see docs/extending.md
    target: str = MISSING
    #: arguments of the target, as in args.x=1; its default numbers, texts and nulls are shown too
    args: Values = field(default_factory=dict)
    #: a further folder to search; klrl stores the folder in which it found the module
    path: str | None = setting(None, free=True)
    #: a digest over the module's local files, part of the job's identity; set by klrl
    source: str | None = None
    version: str | None = None  # version of the module's distribution, if any; set by klrl


def _as_part(value: object) -> object:
    return {"target": value} if isinstance(value, str) else value


def _as_wrapper(value: object) -> object:
    part = _as_part(value)
    if isinstance(part, dict) and isinstance(name := part.get("target"), str) and ":" not in name:
        return {**part, "target": f"gymnasium.wrappers:{name}"}
    return part


#: A custom part, given by its target or its settings; or null.
Part = Annotated[OwnPart | None, BeforeValidator(_as_part)]
#: A Gymnasium wrapper by its name, or a custom part.
Wrapper = Annotated[OwnPart, BeforeValidator(_as_wrapper)]
