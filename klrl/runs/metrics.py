"""The recorded metrics, each declared once: name, title, unit, digits, panel.

One row of ``metrics.jsonl`` is one iteration; row 0 is an evaluation before the first. KLs and
entropies are in nats per frame, means over the rollout; rewards are per frame, before any scaling
for the learner. For language a frame is a token (means over valid tokens), an episode is a
response, and the x-axis counts samples, that is responses; the suffix ``_seq`` means a sum over a
response, averaged over responses. Every row of an iteration satisfies
reward/shaped == reward/raw - kl/ref/penalty.

To add a metric, declare it in ``metrics.yaml`` and write it into the rows: the progress line,
``curves.png``, wandb, the report and ``klrl.report.diff`` read the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

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


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Sums of float32 have this error, about: a KL of equal policies is read as 3e-9 or -1e-10.
_ROUNDING = 1e-7


@dataclass(frozen=True)
class Metric:
    """One entry of the rows of ``metrics.jsonl``, drawn against its domain's axis.

    Texts may hold attributes of a domain, as ``{score}`` and ``{unit}``; see :meth:`of`.
    """

    name: str  # its key in ``metrics.jsonl``
    title: str
    unit: str = ""  # of its values; empty if they have none
    what: str = ""
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


def _declared() -> Iterator[Metric]:
    for entry in yaml.load(Path(__file__).with_suffix(".yaml").read_text("utf-8"), _LOADER):
        for estimator in SAMPLED if "ESTIMATOR" in entry["name"] else ("",):
            texts = {k: entry[k].replace("ESTIMATOR", estimator) for k in ("name", "title", "what")}
            yield Metric(**{**entry, **texts})


#: name -> metric
METRICS = {metric.name: metric for metric in _declared()}

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
        raise ConfigError(f"metric {unknown[0]}: is not declared; add it to klrl/runs/metrics.yaml")
