"""``controller`` against other settings: where the coefficient starts, what a target is of."""

from __future__ import annotations

import math

from klrl.base.errors import ConfigError
from klrl.config import CONTROL, LANGUAGE, JobConfig, TargetControllerConfig

#: domain -> the values of ``controller.unit`` and ``loss.unit``, and the remedy for others
_UNITS = {
    CONTROL: (("step",), "language only; a frame is a step: choose step"),
    LANGUAGE: (
        ("token", "sequence"),
        "control only; choose token (mean over tokens) or sequence (sum over a response)",
    ),
}


def check_start(c: JobConfig) -> None:
    """A coefficient that is multiplied must start inside its bounds, above 0."""
    controller, coef = c.controller, getattr(c.kl, "coef", None)
    if coef is None or not isinstance(controller, TargetControllerConfig):
        return
    if not controller.coef_min <= coef <= controller.coef_max:
        raise ConfigError(
            f"kl.coef={coef:g}: controller={controller.name} multiplies it, within "
            f"controller.coef_min={controller.coef_min:g} .. "
            f"controller.coef_max={controller.coef_max:g}; start inside"
        )


def check_target(c: JobConfig) -> None:
    """A target that the divergence cannot reach."""
    controller = c.controller
    if getattr(c.kl, "divergence", "reverse") != "js":
        return
    if not isinstance(controller, TargetControllerConfig) or controller.unit == "sequence":
        return
    if controller.target >= math.log(2):
        raise ConfigError(
            f"controller.target={controller.target:g}: kl.divergence=js never reaches ln 2 = 0.693 "
            "nats in one state; choose less"
        )


def check_unit(c: JobConfig) -> None:
    """The unit of a target is one that the domain has."""
    allowed, remedy = _UNITS[c.domain]
    for group in ("controller", "loss"):
        unit = getattr(getattr(c, group), "unit", None)
        if unit is not None and unit not in allowed:
            raise ConfigError(f"{group}.unit={unit}: {remedy}")
