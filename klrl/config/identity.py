"""Computes a job's identity: a hash of its settings, and the version of klrl's arithmetic."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection
from typing import NamedTuple

from klrl.config.choices import CHOICES, choice_of
from klrl.config.jobs import JobConfig

#: The version of klrl's arithmetic. It is incremented when new code changes the recorded metrics
#: of equal settings by more than rounding; a release alone does not increment it.
NUMERICS = 5


class Identity(NamedTuple):
    """The identity of a job; jobs with equal identities record the same metrics, up to rounding."""

    settings: str  # :func:`settings_hash`
    numerics: int  # :data:`NUMERICS` in the version of klrl that runs the job; 0 if unknown


def identity(config: JobConfig) -> Identity:
    """Return the identity of a job in this version of klrl."""
    return Identity(settings_hash(config), NUMERICS)


def settings_hash(config: JobConfig) -> str:
    """Return twelve hexadecimal digits of a SHA-256 over :func:`canonical`."""
    text = json.dumps(canonical(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def canonical(config: JobConfig) -> dict[str, object]:
    """Return the settings that change a job's results, in a form in which 1 and 1.0 are equal.

    Omits settings that change no result: those marked ``free``, such as the folder of a custom
    part, and the evaluation settings of a run without evaluations. Also omits a setting with the
    value ``before``, see :func:`klrl.config.fields.added`.
    """
    settings: dict[str, object] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        free = choice_of(f.name, value.name).free if f.name in CHOICES else ()
        settings[f.name] = {} if "*" in free else _canonical(value, free)
    if not config.eval.on:
        settings["eval"] = {"every": 0}  # no other eval setting is read
    return settings


def _canonical(value: object, free: Collection[str] = ()) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        every = [f for f in dataclasses.fields(value) if f.name not in free]
        counted = [f for f in every if not f.metadata.get("free")]
        values = {f: getattr(value, f.name) for f in counted}
        later = [f for f in counted if "added" in f.metadata]
        as_before = {f.name for f in later if values[f] == f.metadata["added"]}
        return {f.name: _canonical(v) for f, v in values.items() if f.name not in as_before}
    if isinstance(value, dict):
        return {str(key): _canonical(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
