"""The two domains of one algorithm, control and language: the only module that knows both.

No torch: a domain's functions are named here, and imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from klrl.config import CONTROL as CONTROL_NAME
from klrl.config import LANGUAGE as LANGUAGE_NAME
from klrl.config import JobConfig, SamplerConfig
from klrl.config.choices import resolve


@dataclass(frozen=True)
class Domain:
    """The terms and the functions of a domain."""

    name: str
    axis: str  # the metric on the x-axis of all others, which ``frames`` counts
    unit: str  # a mean KL is a mean over these
    episode: str  # what an episode is called
    score: str  # what its return is called
    drawn: str  # said before the score of a rollout, whose actions are always sampled
    evaluation: str  # what an evaluation is called
    mode: str  # how a policy is played in one, unless its actions are sampled
    digits: int  # significant digits of a printed score
    plays: int  # episodes (responses) of ``klrl evaluate`` by default
    #: ``parts`` of a run, ``preflight`` of a job, ``load``, ``evaluate`` and ``film`` of a policy
    #: (control), distances ``between`` policies, ``on_task``, another task's settings ->
    #: "module:function".
    functions: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def module(self) -> str:
        """The module of its parts."""
        return self.functions["parts"].partition(":")[0]

    def how(self, config: JobConfig) -> str:
        """How a run is evaluated, in words."""
        if not config.eval.sampled:
            return self.mode
        if not isinstance(config.collector, SamplerConfig):
            return "sampled"
        return f"sampled at temperature {config.collector.temperature:g}"

    def evaluated(self, *, sampled: bool) -> Domain:
        """The domain as it names the evaluations of a run."""
        return replace(self, evaluation="sampled evaluation") if sampled else self

    def function(self, name: str) -> Callable[..., Any]:
        """One of :attr:`functions`, imported now."""
        return resolve(self.functions[name])


CONTROL = Domain(
    CONTROL_NAME,
    axis="frames",
    unit="frame",
    episode="episode",
    score="return",
    drawn="",
    evaluation="evaluation",
    mode="deterministic",
    digits=5,
    plays=100,
    functions={
        "preflight": "klrl.control.preflight:check_job",
        "parts": "klrl.control.parts:ControlParts",
        "load": "klrl.control.load:trained_actor",
        "on_task": "klrl.control.load:control_on_task",
        "evaluate": "klrl.control.evaluate:evaluate_trained",
        "film": "klrl.control.evaluate:film_trained",
        "between": "klrl.control.evaluate:distances",
        "longest": "klrl.control.evaluate:longest_episode",
    },
)
LANGUAGE = Domain(
    LANGUAGE_NAME,
    axis="samples",
    unit="token",
    episode="response",
    score="score",
    drawn="sampled ",
    evaluation="greedy evaluation",
    mode="greedy",
    digits=4,
    plays=512,
    functions={
        "preflight": "klrl.language.run.preflight:check_job",
        "parts": "klrl.language.run.parts:LanguageParts",
        "load": "klrl.language.run.load:trained_causal_lm",
        "on_task": "klrl.language.run.preflight:language_on_task",
        "evaluate": "klrl.language.run.evaluate:evaluate_trained",
        "between": "klrl.language.run.evaluate:distances",
        "longest": "klrl.language.run.evaluate:longest_episode",
    },
)
DOMAINS = {domain.name: domain for domain in (CONTROL, LANGUAGE)}


def domain_of(config: JobConfig) -> Domain:
    """The domain of a job."""
    return DOMAINS[config.domain].evaluated(sampled=config.eval.sampled)


def recorded_domain(manifest: Mapping[str, object]) -> Domain:
    """The domain of a run, from its manifest."""
    return DOMAINS[str(manifest["domain"])].evaluated(
        sampled=manifest.get("evaluation") == "sampled"
    )
