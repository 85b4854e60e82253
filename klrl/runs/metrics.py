"""Declares each recorded metric once: name, title, unit, digits, panel.

A row of ``metrics.jsonl`` is one iteration; row 0 is an evaluation before the first iteration. KLs
and entropies are means over the rollout, in nats per frame. ``reward/raw`` and ``reward/shaped``
are means per frame, before any scaling for the learner; they differ by ``kl/ref/penalty``.

For language, a frame is a valid token, an episode is a response, and the x-axis counts samples,
that is, responses. A metric with the suffix ``_seq`` is summed over a response, and averaged over
responses.

To add a metric, declare it in ``metrics.yaml``, and compute it. For a metric of a loss, the loss
stores a value per frame in ``LossTerms.measured``, and klrl writes their mean. For a metric of a
rollout, the domain's function ``rewards_of`` computes the number. The progress line,
``curves.png``, wandb, the report and ``klrl diff`` then show the metric as declared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from klrl.base.digits import number
from klrl.base.errors import ConfigError
from klrl.base.tables import read_table
from klrl.config.placement import SAMPLED
from klrl.domains import Domain


@dataclass(frozen=True)
class Panel:
    """A panel of several metrics in ``curves.png``; the report has a chart for each metric."""

    title: str | None  # None if only the report draws its metrics
    log: bool  # True if the y-axis is logarithmic; then values that are shown as 0 are left out


#: Key of a panel -> the panel, in the order of ``curves.png``.
PANELS: dict[str, Panel] = {
    "score": Panel("{score}", log=False),
    "kl": Panel("KL", log=True),
    "coefficient": Panel("coefficient", log=True),
    "speed": Panel(None, log=False),
}


#: Smaller KLs count as rounding errors: in float32, the KL of equal policies may be 3e-9 or -1e-10.
_ROUNDING = 1e-7


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric, that is, of a key in the rows of ``metrics.jsonl``.

    Texts may contain placeholders for a domain's terms, such as ``{score}``; see :meth:`of`.
    """

    name: str  # its key in ``metrics.jsonl``
    title: str
    what: str
    unit: str = ""  # the unit of its values; empty without a unit
    digits: int | None = 4  # significant digits; 0 for a count; None for a score: Domain.digits
    panel: str | None = None  # its key in PANELS; None if it is not drawn
    short: str = ""  # its label in the progress line; empty if it is not shown there
    unless: str = ""  # a metric in whose place it is drawn and shown, in rows without that one
    domain: str | None = None  # name of the only domain that records it; None if both do
    charged: bool = False  # True for a loss term: it is reduced like the loss, not averaged

    def of(self, domain: Domain) -> Metric:
        """Return the metric with the domain's terms and, for a score, with the domain's digits."""
        return replace(
            self,
            title=fill(self.title, domain),
            unit=fill(self.unit, domain),
            what=fill(self.what, domain),
            short=fill(self.short, domain),
            digits=domain.digits if self.digits is None else self.digits,
        )

    def show(self, value: float, *, signed: bool = False) -> str:
        """Format a value; KLs within rounding error are 0. For a score, call :meth:`of` first."""
        assert self.digits is not None, f"{self.name}: call of(domain) first"
        small = self.unit.startswith("nats") or self.name in ("kl/ref/penalty", "loss/kl_ref")
        return number(
            0.0 if small and abs(value) < _ROUNDING else value, self.digits, signed=signed
        )


def fill(text: str, domain: Domain) -> str:
    """Replace a domain's terms in a text: ``nats per {unit}`` -> ``nats per frame``."""
    return text.format_map(vars(domain))


def heading(title: str) -> str:
    """Capitalise a title, unless it begins with a setting or a formula (KL(old||new))."""
    return title[:1].upper() + title[1:] if title.partition(" ")[0].isalpha() else title


def _declared() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for entry in read_table(Path(__file__).with_suffix(".yaml")):
        metric = Metric(**entry)
        for each in SAMPLED if "ESTIMATOR" in metric.name else ("",):
            name, title, what = (
                text.replace("ESTIMATOR", each) for text in (metric.name, metric.title, metric.what)
            )
            found[name] = replace(metric, name=name, title=title, what=what)
    return found


#: Name -> metric.
METRICS = _declared()

#: Names of the timing metrics, which differ even between runs of the same job.
TIMES = tuple(name for name in METRICS if name.startswith("time/"))

Row = dict[str, float]

#: The key of the run's id in each line of ``metrics.jsonl`` and ``samples.jsonl``; not a metric.
RUN = "run"


def metrics_of(domain: Domain) -> dict[str, Metric]:
    """Return the metrics that a domain records, with its terms filled in, in declared order."""
    return {
        name: metric.of(domain)
        for name, metric in METRICS.items()
        if metric.domain in (None, domain.name)
    }


#: Prefix of a single reward function's metric, if ``env.reward`` lists several functions.
PART = "reward/part/"


def metric_of(name: str, domain: Domain) -> Metric:
    """Return a metric with the domain's terms filled in; an undeclared metric has only a name."""
    metric = METRICS.get(name)
    if metric is None and name.startswith(PART):
        label, unit = name.removeprefix(PART), f"reward per {domain.episode}"
        what = "mean score by this reward function, before its weight"
        return Metric(name, f"reward {label}", what, unit, digits=domain.digits)
    return Metric(name, name, "", digits=5) if metric is None else metric.of(domain)


def require_declared(names: Iterable[str]) -> None:
    """Refuse metrics that have no declaration."""
    unknown = sorted(name for name in set(names) - set(METRICS) if not name.startswith(PART))
    if unknown:
        raise ConfigError(f"metric {unknown[0]}: is not declared; add it to klrl/runs/metrics.yaml")
