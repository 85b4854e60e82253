"""Defines the two domains, control and language: their terms in messages, and their functions.

The functions are imported on first use, so this module does not import torch.
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
    """The terms of a domain in messages and charts, and the functions of the domain."""

    name: str
    axis: str  # the metric on the x-axis of charts
    unit: str  # the term for a step; a mean KL is in nats per step
    episode: str  # the term for an episode
    score: str  # the term for a return
    drawn: str  # prefix of ``score`` in the titles of training metrics
    evaluation: str  # the term for an evaluation
    mode: str  # how an evaluation chooses actions with ``eval.sampled=false``
    digits: int  # significant digits of a printed score
    plays: int  # default number of episodes or responses in ``klrl evaluate`` and ``klrl kl``
    #: Name -> "module:function". ``job_checks`` checks a job and ``parts`` builds a run. ``load``,
    #: ``evaluate``, ``export`` and, for control, ``film`` and ``record`` use a stored policy.
    #: ``between`` compares two policies. ``on_task`` returns a stored run's settings with a changed
    #: task and ``of_model`` (language) or ``of_code`` (control) those of a policy that klrl did not
    #: train. ``longest`` returns the largest number of steps that an episode may have.
    functions: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def module(self) -> str:
        """The module that builds the domain's runs."""
        return self.functions["parts"].partition(":")[0]

    def how(self, config: JobConfig) -> str:
        """Describe how the evaluations of a run choose actions."""
        if not config.eval.sampled:
            return self.mode
        if not isinstance(config.collector, SamplerConfig):
            return "sampled"
        return f"sampled at temperature {config.collector.temperature:g}"

    def evaluated(self, *, sampled: bool) -> Domain:
        """Return the domain; if ``sampled``, :attr:`evaluation` becomes "sampled evaluation"."""
        return replace(self, evaluation="sampled evaluation") if sampled else self

    def function(self, name: str) -> Callable[..., Any]:
        """Import and return one of :attr:`functions`."""
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
        "job_checks": "klrl.control.run.job_checks:check_job",
        "parts": "klrl.control.run.parts:ControlParts",
        "load": "klrl.control.run.load:trained_actor",
        "on_task": "klrl.control.run.load:control_on_task",
        "of_code": "klrl.control.run.load:job_of_code",
        "evaluate": "klrl.control.run.evaluate:evaluate_trained",
        "film": "klrl.control.run.evaluate:film_trained",
        "record": "klrl.control.run.evaluate:record_trained",
        "export": "klrl.control.run.export:export_run",
        "between": "klrl.control.run.evaluate:distances",
        "longest": "klrl.control.run.evaluate:longest_episode",
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
        "job_checks": "klrl.language.run.job_checks:check_job",
        "parts": "klrl.language.run.parts:LanguageParts",
        "load": "klrl.language.run.load:trained_causal_lm",
        "on_task": "klrl.language.run.job_checks:language_on_task",
        "evaluate": "klrl.language.run.evaluate:evaluate_trained",
        "export": "klrl.language.run.export:export_run",
        "between": "klrl.language.run.evaluate:distances",
        "of_model": "klrl.language.run.job_checks:job_of_model",
        "longest": "klrl.language.run.evaluate:longest_episode",
    },
)
DOMAINS = {domain.name: domain for domain in (CONTROL, LANGUAGE)}


def domain_of(config: JobConfig) -> Domain:
    """Return the domain of a job; its ``evaluation`` depends on ``eval.sampled``."""
    return DOMAINS[config.domain].evaluated(sampled=config.eval.sampled)


def recorded_domain(manifest: Mapping[str, object]) -> Domain:
    """Return the domain that a run's manifest names; the manifest determines ``evaluation``."""
    return DOMAINS[str(manifest["domain"])].evaluated(
        sampled=manifest.get("evaluation") == "sampled"
    )
