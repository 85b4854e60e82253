"""The two kinds of task that one algorithm serves: the only place that knows both.

Light: no torch. What a domain does is named here and imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klrl.config import CONTROL as CONTROL_NAME
from klrl.config import LANGUAGE as LANGUAGE_NAME
from klrl.config import JobConfig
from klrl.config.choices import resolve


@dataclass(frozen=True)
class Domain:
    """What one kind of task is told in, and who does what for it.

    Attributes:
        name: control or language.
        axis: the metric that is the x-axis of all others: what ``frames`` counts.
        unit: what a mean KL is a mean over.
        episode: what a return is the return of.
        score: what that return is called.
        evaluation: what an evaluation is called.
        digits: significant ones of a score, for people.
        plays: episodes (responses) of an evaluation from the command line.
        does: what it does -> "module:function".
    """

    name: str
    axis: str
    unit: str
    episode: str
    score: str
    evaluation: str
    digits: int
    plays: int
    does: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def module(self) -> str:
        """Where its parts are."""
        return self.does["parts"].partition(":")[0]

    def preflight(
        self, config: JobConfig, overridden: frozenset[str] = frozenset(), *, resumed: bool = False
    ) -> None:
        """Refuse a job that this machine cannot run; see ``klrl.runs.machine``."""
        resolve(self.does["preflight"])(config, overridden, resumed=resumed)

    def parts(self, config: JobConfig, before: Mapping[str, Any] | None = None) -> Any:
        """Build what a run needs; arguments as :class:`klrl.train.loop.Training`."""
        return resolve(self.does["parts"])(config, before)

    def load(self, run: Path, which: str = "last", device: str = "cpu") -> Any:
        """The trained policy of a run; see :func:`klrl.api.load_policy`."""
        return resolve(self.does["load"])(run, which, device)

    def on_task(self, run: Path, own: JobConfig, words: Sequence[str]) -> JobConfig:
        """A run's settings with another task; see :mod:`klrl.runs.other_task`."""
        return resolve(self.does["on_task"])(run, own, words)

    def evaluate(self, run: Path, config: JobConfig, **how: Any) -> Any:
        """Play a run's policy; see :func:`klrl.train.evaluate.evaluate_run`."""
        return resolve(self.does["evaluate"])(run, config, **how)


CONTROL = Domain(
    CONTROL_NAME,
    axis="frames",
    unit="frame",
    episode="episode",
    score="return",
    evaluation="evaluation",
    digits=5,
    plays=20,
    does={
        "preflight": "klrl.control.preflight:check_job",
        "parts": "klrl.control.parts:ControlParts",
        "load": "klrl.control.load:trained_actor",
        "on_task": "klrl.control.other_task:control_on_task",
        "evaluate": "klrl.control.evaluate:evaluate_trained",
    },
)
LANGUAGE = Domain(
    LANGUAGE_NAME,
    axis="samples",
    unit="token",
    episode="response",
    score="reward",
    evaluation="greedy evaluation",
    digits=4,
    plays=512,
    does={
        "preflight": "klrl.language.preflight:check_job",
        "parts": "klrl.language.parts:LanguageParts",
        "load": "klrl.language.load:trained_causal_lm",
        "on_task": "klrl.language.other_task:language_on_task",
        "evaluate": "klrl.language.evaluate:evaluate_trained",
    },
)
DOMAINS = {domain.name: domain for domain in (CONTROL, LANGUAGE)}


def domain_of(config: JobConfig) -> Domain:
    """The domain of a job."""
    return DOMAINS[config.domain]


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
