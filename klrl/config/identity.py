"""Computes a job's identity: a hash of its settings, and the version of klrl's arithmetic."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from klrl.config.choices import CHOICES, NAME
from klrl.config.fields import OwnPart, nested_schema
from klrl.config.jobs import JobConfig
from klrl.config.schemas.record import EvalConfig
from klrl.config.schemas.root import Ungrouped

#: The version of klrl's arithmetic. It is incremented when new code changes the recorded metrics
#: of equal settings by more than rounding; a release alone does not increment it.
#: 7: each sampled token of a language model is drawn with a random number of its own, and scoring
#: layouts are chosen by their cost; prompts are shuffled within adjacent parts of a rollout.
NUMERICS = 8


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


def canonical(config: JobConfig | Mapping[str, object]) -> dict[str, object]:
    """Return the settings that change a job's results, in a form in which 1 and 1.0 are equal.

    Omits settings that change no result: those marked ``free``, such as the folder of a custom
    part, and the evaluation settings of a run without evaluations. Also omits a setting with the
    value ``before``, see :func:`klrl.config.fields.added`; stored settings get it if they lack it.
    """
    stored = isinstance(config, Mapping)
    settings = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    fields = dataclasses.fields(Ungrouped)
    ungrouped = {f.name: nested_schema(f) for f in fields}
    omitted = {f.name for f in fields if f.metadata.get("free")}
    result: dict[str, object] = {}
    for name, value in settings.items():
        if name in omitted:
            continue
        chosen = value.get(NAME) if isinstance(value, Mapping) else None
        choice = CHOICES.get(name, {}).get(str(chosen))
        schema, free = (choice.schema, choice.free) if choice else (ungrouped.get(name), ())
        result[name] = {} if "*" in free else _canonical(value, schema, free, fill=stored)
    timing = settings.get("eval")
    known = timing if isinstance(timing, Mapping) else {}
    when = {key: known[key] for key in ("every", "evaluations") if key in known}
    if "every" in when and not EvalConfig(**when).on:
        result["eval"] = {"every": 0}  # no other eval setting is read
    return result


def _canonical(
    value: object, schema: type | None = None, free: Collection[str] = (), *, fill: bool
) -> object:
    if isinstance(value, Mapping):
        known = {f.name: f for f in dataclasses.fields(schema)} if schema else {}
        omitted = {*free, *(name for name, f in known.items() if f.metadata.get("free"))}
        added = schema() if schema and any("added" in f.metadata for f in known.values()) else None
        before = {k: getattr(added, k) for k, f in known.items() if "added" in f.metadata}
        inner = {k: OwnPart if "own" in f.metadata else nested_schema(f) for k, f in known.items()}
        return {
            str(key): _canonical(each, inner.get(key), fill=fill)
            for key, each in ({**value, **before, **value} if fill else value).items()
            if key not in omitted and (fill or key not in before or each != before[key])
        }
    if isinstance(value, list | tuple):
        return [_canonical(each, schema, fill=fill) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
