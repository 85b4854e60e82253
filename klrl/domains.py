"""The two kinds of task that one algorithm serves, and what they differ in for the record.

Light: no torch. Whoever needs to know what ``frames`` counts, or in what a return is told, asks the
domain of a job, or of a run by what its manifest says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klrl.config import Config, JobConfig, LanguageConfig


@dataclass(frozen=True)
class Domain:
    """What the record of a job is told in.

    Attributes:
        name: control or language.
        axis: the metric that is the x-axis of all others: what ``frames`` counts.
        unit: what a mean KL is a mean over.
        episode: what a return is the return of.
        score: what that return is called.
        evaluation: what an evaluation is called.
        digits: significant ones of a score, for people.
    """

    name: str
    axis: str
    unit: str
    episode: str
    score: str
    evaluation: str
    digits: int


CONTROL = Domain("control", "frames", "frame", "episode", "return", "evaluation", digits=5)
LANGUAGE = Domain(
    "language", "samples", "token", "response", "reward", "greedy evaluation", digits=4
)

_DOMAIN_OF: dict[type[JobConfig], Domain] = {Config: CONTROL, LanguageConfig: LANGUAGE}
DOMAINS = {domain.name: domain for domain in (CONTROL, LANGUAGE)}


def domain_of(config: JobConfig) -> Domain:
    """The domain of a job."""
    return _DOMAIN_OF[type(config)]


def recorded_domain(manifest: Mapping[str, Any], metrics: Mapping[str, Any]) -> Domain:
    """The domain of a run, by its manifest; of a run of 0.1.0 by the metrics that it recorded.

    Args:
        manifest: what ``manifest.json`` says.
        metrics: names in ``metrics.jsonl``.
    """
    name = manifest.get("domain")
    if name is None:
        return LANGUAGE if LANGUAGE.axis in {*manifest, *metrics} else CONTROL
    return DOMAINS[str(name)]
