"""The recorded metrics, each declared once: name, title, unit, digits, panel.

One row of ``metrics.jsonl`` is one iteration; row 0 is an evaluation before the first. KLs and
entropies are in nats per frame, means over the rollout; rewards are per frame, before any scaling
for the learner. For language a frame is a token (means over valid tokens), an episode is a
response, and the x-axis counts samples, that is responses; the suffix ``_seq`` means a sum over a
response, averaged over responses. Every row of an iteration satisfies
reward/shaped == reward/raw - kl/ref/penalty.

To add a metric, declare it in :data:`METRICS` and write it into the rows: the progress line,
``curves.png``, wandb, the report and ``klrl.report.diff`` read the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from klrl.base.digits import number
from klrl.base.errors import ConfigError
from klrl.config.placement import SAMPLED

if TYPE_CHECKING:
    from klrl.domains import Domain


@dataclass(frozen=True)
class Panel:
    """A panel of ``curves.png``, of several metrics; in the report each has its own chart."""

    title: str | None  # None for metrics that only the report draws
    log: bool  # whether the y-axis is logarithmic; values <= 0 are left out there


#: name -> panel, in the order of ``curves.png``
PANELS: dict[str, Panel] = {
    "score": Panel("{score}", log=False),
    "kl": Panel("KL", log=True),
    "coefficient": Panel("coefficient", log=True),
    "speed": Panel(None, log=False),
}


#: Sums of float32 have this error, about: a KL of equal policies is read as 3e-9 or -1e-10.
_ROUNDING = 1e-7


@dataclass(frozen=True)
class Metric:
    """One entry of the rows of ``metrics.jsonl``, drawn against its domain's axis.

    Texts may hold attributes of a domain, as ``{score}`` and ``{unit}``; see :meth:`of`.
    """

    name: str  # its key in ``metrics.jsonl``
    title: str
    unit: str  # of its values; empty if they have none
    what: str
    digits: int | None = 4  # significant; 0 for a count, None for a score: the domain's
    panel: str | None = None  # its key in PANELS; None if it is not drawn
    short: str = ""  # its label in the progress line; empty if it is not shown there
    domain: str | None = None  # the name of the only domain that records it; None if all do
    charged: bool = False  # a term of the loss, reduced as the loss is; else observed: a mean

    def of(self, domain: Domain) -> Metric:
        """The metric with the domain's terms in its texts, and the domain's digits."""
        return replace(
            self,
            title=fill(self.title, domain),
            unit=fill(self.unit, domain),
            what=fill(self.what, domain),
            short=fill(self.short, domain),
            digits=domain.digits if self.digits is None else self.digits,
        )

    def show(self, value: float, *, signed: bool = False) -> str:
        """A value as text, a KL of rounding size as 0; for a score call :meth:`of` first."""
        assert self.digits is not None, f"{self.name}: call of(domain) first"
        small = self.unit.startswith("nats") or self.name in ("kl/ref/penalty", "loss/kl_ref")
        return number(
            0.0 if small and abs(value) < _ROUNDING else value, self.digits, signed=signed
        )


def fill(text: str, domain: Domain) -> str:
    """``nats per {unit}`` -> ``nats per frame``."""
    return text.format_map(vars(domain))


def heading(title: str) -> str:
    """A title with a capital, unless it begins with a setting or a formula (KL(old||new))."""
    return title[:1].upper() + title[1:] if title.partition(" ")[0].isalpha() else title


_KL_REF = "KL(policy||reference)"

_DECLARED = (
    Metric("iteration", "iterations", "rollouts", "rollouts so far", digits=0),
    Metric(
        "frames",
        "frames",
        "environment steps",
        "environment steps so far, all copies counted; the x-axis",
        digits=0,
        domain="control",
    ),
    Metric(
        "samples",
        "samples",
        "responses",
        "responses so far; the x-axis",
        digits=0,
        domain="language",
    ),
    Metric(
        "reward/episode",
        "{drawn}training {score}",
        "{score} per {episode}",
        "mean unshaped {score} of the {episode}s that ended in this rollout",
        digits=None,
        panel="score",
        short="{drawn}{score}",
    ),
    Metric(
        "eval/return",
        "{evaluation} {score}",
        "{score} per {episode}",
        "mean {score} of fresh {episode}s; in the last row that of the closing evaluation",
        digits=None,
        panel="score",
        short="{evaluation}",
    ),
    Metric(
        "reward/gold",
        "{drawn}training gold score",
        "gold score per {episode}",
        "mean gold score, where the reward is a proxy of it",
        digits=None,
        panel="score",
        domain="language",
    ),
    Metric(
        "eval/gold",
        "{evaluation} gold score",
        "gold score per {episode}",
        "mean gold score of the evaluation, where the reward is a proxy of it",
        digits=None,
        panel="score",
        domain="language",
    ),
    Metric(
        "eval/return_std",
        "spread of the {evaluation} {score}",
        "{score} per {episode}",
        "standard deviation over the {episode}s of the evaluation, with n below",
        digits=None,
    ),
    Metric(
        "eval/return_se",
        "standard error of the {evaluation} {score}",
        "{score} per {episode}",
        "of eval/return: s / sqrt(n), with n - 1 below s",
        digits=2,
    ),
    Metric(
        "eval/episodes",
        "{episode}s of the {evaluation}",
        "{episode}s",
        "how many ended, and count in eval/return",
        digits=0,
    ),
    Metric(
        "eval/cut",
        "unfinished {episode}s of the {evaluation}",
        "{episode}s",
        "how many did not end within the steps that they were given, and do not count",
        digits=0,
        domain="control",
    ),
    Metric(
        "eval/best_return",
        "{evaluation} {score} of the best checkpoint",
        "{score} per {episode}",
        "in the closing evaluation, from start states that did not choose it",
        digits=None,
    ),
    Metric(
        "eval/best_return_se",
        "standard error of the {evaluation} {score} of the best checkpoint",
        "{score} per {episode}",
        "of eval/best_return",
        digits=2,
    ),
    Metric(
        "reward/episode_length",
        "{episode} length",
        "{unit}s",
        "mean length of the {episode}s that ended in this rollout",
    ),
    Metric(
        "reward/episodes",
        "{episode}s",
        "{episode}s per rollout",
        "how many {episode}s ended in this rollout",
    ),
    Metric(
        "reward/truncated",
        "cut off",
        "share of responses",
        "share of responses cut off at collector.max_new_tokens",
        domain="language",
    ),
    Metric(
        "reward/raw",
        "unshaped reward",
        "reward per {unit}",
        "mean reward as the environment or the reward function gave it",
    ),
    Metric(
        "reward/shaped",
        "shaped reward",
        "reward per {unit}",
        "mean reward less the penalty",
    ),
    Metric(
        "kl/ref/exact",
        _KL_REF,
        "nats per {unit}",
        "distance to the reference, in closed form: over all actions, or the whole vocabulary",
        panel="kl",
        short="KL ref",
    ),
    *(
        Metric(
            f"kl/ref/{name}",
            f"{_KL_REF} by {name}",
            "nats per {unit}",
            f"distance to the reference, estimated by {name} from the samples",
        )
        for name in SAMPLED
    ),
    *(
        Metric(
            f"kl/ref/{name}_seq",
            _KL_REF if name == "exact" else f"{_KL_REF} by {name}",
            "nats per {episode}",
            f"kl/ref/{name}, summed over a response",
            domain="language",
        )
        for name in ("exact", *SAMPLED)
    ),
    Metric(
        "kl/ref/floor",
        "what rounding reads as KL",
        "nats per {unit}",
        "KL of the policy that sampled from the same policy scored, truly 0; recorded in bfloat16, "
        "where no smaller KL is known",
        digits=2,
        domain="language",
    ),
    Metric(
        "div/ref/charged",
        "charged divergence",
        "nats per {unit}",
        "kl.divergence of policy and reference, where it is not the reverse KL",
        panel="kl",
    ),
    Metric(
        "div/ref/charged_seq",
        "charged divergence",
        "nats per {episode}",
        "div/ref/charged, summed over a response",
        domain="language",
    ),
    Metric(
        "div/ref/charged_error",
        "standard error of the charged divergence",
        "nats per {unit}",
        "of div/ref/charged, where it is sampled (js of Gaussians)",
        domain="control",
    ),
    Metric(
        "kl/old/exact",
        "KL(old||new)",
        "nats per {unit}",
        "how far the update moved the policy, in closed form",
        panel="kl",
        short="KL old",
    ),
    Metric(
        "learner/reward_norm",
        "reward normaliser",
        "1 per reward",
        "env.normalize_reward: what the learner's rewards were multiplied by",
        domain="control",
    ),
    Metric(
        "kl/old/target",
        "target of KL(old||new)",
        "nats per {unit}",
        "loss.dtarg in this iteration, where loss.dtarg_end anneals it or loss.unit=sequence "
        "divides it by the mean length",
    ),
    Metric(
        "kl/ref/coef",
        "kl.coef",
        "reward per nat",
        f"coefficient of {_KL_REF} in this iteration",
        panel="coefficient",
    ),
    Metric(
        "kl/old/beta",
        "loss.beta",
        "advantage per nat",
        "coefficient of KL(old||new) during the update",
        panel="coefficient",
        short="beta",
    ),
    Metric(
        "kl/ref/penalty",
        "penalty",
        "reward per {unit}",
        "penalty in the reward: kl.coef times the KL (or kl.divergence) that was applied",
    ),
    Metric(
        "loss/kl_ref",
        "penalty in the loss",
        "reward per {unit}",
        f"kl.coef times {_KL_REF} (or kl.divergence) in the loss (placement loss or split)",
        charged=True,
    ),
    Metric(
        "loss/objective",
        "objective",
        "",
        "minus the policy's gain, penalty included",
        charged=True,
    ),
    Metric("loss/critic", "critic loss", "", "the critic's loss, weighted", charged=True),
    Metric("loss/entropy", "entropy loss", "", "minus the weighted entropy bonus", charged=True),
    Metric(
        "policy/entropy",
        "entropy",
        "nats per {unit}",
        "of the action distribution; of tokens the mean of -log pi of those that were sampled",
    ),
    Metric(
        "policy/gap",
        "largest gap of sampled and scored log-probs",
        "nats",
        "of a token's log-prob while it was sampled and by scoring; recorded in bfloat16",
        digits=2,
        domain="language",
    ),
    Metric("learner/grad_norm", "gradient norm", "", "before clipping"),
    Metric("learner/lr", "learning rate", "", "during the update"),
    Metric("learner/epochs", "epochs", "passes over the rollout", "passes that the update made"),
    Metric("learner/alpha", "step kept", "share", "of the actor's step, by loss.line_search"),
    *(
        Metric(
            f"time/{axis}_per_second",
            "throughput",
            f"{axis} per second",
            f"{axis} of this iteration over its seconds",
            panel="speed",
            domain=domain,
        )
        for axis, domain in (("frames", "control"), ("samples", "language"))
    ),
    Metric("time/iteration", "time", "seconds", "of this iteration"),
    Metric("time/sampling", "time of sampling", "seconds", "of the rollout in this iteration"),
    Metric(
        "time/reward",
        "time of the reward",
        "seconds",
        "of the reward functions in this iteration",
        domain="language",
    ),
    Metric("time/scoring", "time of scoring", "seconds", "of reference, KL and advantage"),
    Metric("time/update", "time of the update", "seconds", "of the update in this iteration"),
    Metric("time/evaluation", "evaluation time", "seconds", "of the evaluations in this row"),
)

#: name -> metric
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}

#: Metrics of the machine's speed, which differ between two equal runs.
TIMES = tuple(name for name in METRICS if name.startswith("time/"))

Row = dict[str, float]

#: In each line of ``metrics.jsonl`` and ``samples.jsonl``: the id of its run, which is no metric.
RUN = "run"


def metrics_of(domain: Domain) -> dict[str, Metric]:
    """All metrics that the domain records, with its terms, in declared order."""
    return {
        name: metric.of(domain)
        for name, metric in METRICS.items()
        if metric.domain in (None, domain.name)
    }


#: Before the label of a reward function, where ``env.reward`` lists several.
PART = "reward/part/"


def metric_of(name: str, domain: Domain) -> Metric:
    """One metric with the domain's terms; an unknown one (of another version) has its name only."""
    metric = METRICS.get(name)
    if metric is None and name.startswith(PART):
        label, unit = name.removeprefix(PART), f"reward per {domain.episode}"
        what = "mean score by this reward function, before its weight"
        return Metric(name, f"reward {label}", unit, what, digits=domain.digits)
    return Metric(name, name, "", "", digits=5) if metric is None else metric.of(domain)


def require_declared(names: Iterable[str]) -> None:
    """Refuse metrics that have no declaration."""
    unknown = sorted(name for name in set(names) - set(METRICS) if not name.startswith(PART))
    if unknown:
        raise ConfigError(f"metric {unknown[0]}: is not declared; add it to klrl/runs/metrics.py")
