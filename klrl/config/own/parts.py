"""Which parts of the user's own a job has, and what klrl gives to those of each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from klrl.config.choices import CHOICES
from klrl.config.fields import OwnPart
from klrl.config.jobs import JobConfig

#: Setting of a part -> the arguments that klrl gives it, by keyword.
GIVEN: Mapping[str, tuple[str, ...]] = {
    "env": (),
    "actor": ("inputs", "outputs"),
    "actor.own_critic": ("inputs",),
    "env.wrappers": ("env",),
    "kl.own_estimator": ("log_ratio",),
    "kl.own_divergence": ("log_ratio",),
    "controller": ("coef", "frames"),
    "logger": ("folder", "settings", "group", "axis"),
    "advantage": ("config", "critic", "reward_scale", "normalizer"),
    "loss": ("config", "reference_estimator", "divergence", "reward_scale"),
    "loss.own_beta_rule": ("config", "beta", "dtarg"),
}


def own_parts(config: JobConfig) -> Iterator[tuple[str, OwnPart]]:
    """The user's own parts of a job, each with its setting: ``controller``."""
    for group in CHOICES:
        part = getattr(config, group)
        if isinstance(part, OwnPart):
            yield group, part
        for f in dataclasses.fields(part):
            inner = getattr(part, f.name)
            if isinstance(inner, OwnPart):
                yield f"{group}.{f.name}", inner
            elif f.metadata.get("own") and isinstance(inner, list):
                for i, each in enumerate(inner):
                    yield f"{group}.{f.name}[{i}]", each


def restore(group: Any) -> None:
    """Make the parts within a group's settings again from what ``asdict`` made of them."""
    for f in dataclasses.fields(group):
        value = getattr(group, f.name)
        if f.metadata.get("own") and isinstance(value, Mapping):
            setattr(group, f.name, OwnPart(**value))
