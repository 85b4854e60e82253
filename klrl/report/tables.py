"""Makes the page's tables of text and markup; ``page.html`` lays them out and escapes the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape

from klrl.base.digits import number, places, span
from klrl.base.digits import show as show_number
from klrl.base.text import counted
from klrl.domains import Domain
from klrl.report.differences import Difference, OverTasks, shown
from klrl.report.equal_kl import EqualKL
from klrl.report.measures import (
    Line,
    Measure,
    last_evaluated,
    line_value,
    recorded_metrics,
    reward_metric,
)
from klrl.report.outcomes import returns_text, seeds_text
from klrl.report.runs import ReadRun
from klrl.report.settings import LeftOut, differing, show
from klrl.report.statistics import POWER, Estimate
from klrl.runs.metrics import metric_of
from klrl.runs.returns import with_error

#: Keys of the measures in the table of :func:`results`; :func:`other_numbers` shows all others.
RESULTS = (
    *("return", "eval_return", "eval_error", "eval_best", "gold", "eval_gold"),
    *("kl_ref", "kl_ref_token"),
)

_BAD = Markup('<span class="bad">{}</span>')


class Table(NamedTuple):
    """A table; the first cell of a row is its header."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def stacked(text: str, *below: str) -> Markup:
    """Make a cell: ``text``, and below it a small line for each non-empty text in ``below``."""
    small = Markup("<small>{}</small>")
    return escape(text) + Markup().join(small.format(each) for each in below if each)


def at_equal_kl(equal: EqualKL) -> Table:
    """Tabulate the return at equal KL, one row per family of runs (see ``equal_kl.py``)."""
    levels = [stacked(f"KL = {number(each, 3)}", equal.kl.unit) for each in equal.levels]
    rows = [[name, *map(_estimate, row)] for name, row in equal.families.items()]
    return Table(["family", *levels], rows)


def results(lines: Sequence[Line], measures: Sequence[Measure], short: Mapping[int, int]) -> Table:
    """Tabulate scores and KL of every setting: mean and interval, interquartile mean, worst seed.

    ``short``: index of a setting -> number of its runs that ended early.
    """
    chosen = [measure for measure in measures if measure.key in RESULTS]
    head = ["setting", stacked("seeds", "finished"), *map(_head, chosen)]
    # With one seed, the columns IQM and worst seed would repeat the return.
    several = any(len(line.setting.runs) > 1 for line in lines)
    beside = several and bool(chosen) and chosen[0].key == "return"
    if beside:
        head[3:3] = ["IQM", "worst seed"]
    rows = []
    for i, line in enumerate(lines):
        cells = [_cell(line, each.key) for each in chosen]
        score = line.estimates["return"]
        if beside and score is not None:
            decimals = places(score.value, score.error)
            cells[1:1] = [show_number(each, decimals) for each in (score.iqm, score.least)]
        elif beside:
            cells[1:1] = ["", ""]
        told = f"{short[i]} short" if i in short else ""
        seeds = stacked(seeds_text(line.setting), told, returns_text(line))
        rows.append([line.setting.name, seeds, *cells])
    return Table(head, rows)


def other_numbers(lines: Sequence[Line], measures: Sequence[Measure]) -> Table:
    """Tabulate the other measures: coefficients, trust region, speed."""
    chosen = [measure for measure in measures if measure.key not in RESULTS]
    rows = [[line.setting.name, *(_cell(line, each.key) for each in chosen)] for line in lines]
    return Table(["setting", *map(_head, chosen)], rows)


def every_run(lines: Sequence[Line]) -> Table:
    """Tabulate each run's final return, and its last evaluations with their standard errors."""
    runs = [run for line in lines for run in line.setting.runs]
    kept = [
        name
        for name in ("eval/return", "eval/best_return")
        if any(name in run.columns for run in runs)
    ]
    titles = (metric_of(name, runs[0].domain).title for name in (reward_metric(runs), *kept))
    rows = [_run_row(line, i, kept) for line in lines for i in range(len(line.setting.runs))]
    return Table(["setting", "seed", "state", *titles], rows)


def _run_row(line: Line, i: int, evaluated: Sequence[str]) -> list[str]:
    run, value = line.setting.runs[i], float(line.values["return"][i])
    state = _BAD.format(run.status) if run.failed else run.status
    score = "" if math.isnan(value) else number(value, 4)
    row = last_evaluated(run, "eval/return")
    # Only the first cell says how actions were chosen: it was the same in both evaluations.
    cells = [with_error(row, name, run.domain) if name in row else "" for name in evaluated]
    if "eval/return" in row:
        sampled = run.domain.evaluation.startswith("sampled")
        episodes = counted(int(row.get("eval/episodes", 0)), run.domain.episode)
        how = "sampled" if sampled else run.domain.mode
        cells[0] = stacked(cells[0], f"{episodes}, {how}")
    return [line.setting.name, str(run.seed), state, score, *cells]


def _head(measure: Measure) -> str:
    """Make a column's head: title, unit and reduction over iterations, one below the other."""
    return stacked(measure.metric.title, measure.metric.unit, measure.how)


def _cell(line: Line, key: str) -> str:
    """Make the cell of a measure; if some seeds lack the measure, say how many have it."""
    value, runs = line.estimates[key], len(line.setting.runs)
    cell = _estimate(value)
    # For returns, the column ``seeds`` already shows this number.
    if value is None or value.seeds == runs or key == "return":
        return cell
    return cell + stacked("", f"{value.seeds} of {runs}")


def _estimate(value: Estimate | None) -> str:
    """Make a cell: mean above interval; with fewer than five seeds, range above mean."""
    if value is None:
        return ""
    decimals = places(value.value, value.error)
    mean = show_number(value.value, decimals)
    # Show only the mean of one seed, or of equal values, such as a fixed coefficient.
    if value.least == value.most:
        return mean
    if value.low is None or value.high is None:
        return stacked(span(value.least, value.most, decimals), f"mean {mean}")
    return stacked(mean, span(value.low, value.high, decimals))


def differences(lines: Sequence[Line], pairs: Sequence[Difference]) -> Table:
    """Tabulate the differences of final returns for the pairs that :func:`shown` selects."""
    means = [abs(line_value(line, "return")) for line in lines]

    def tell(of: Difference) -> tuple[str, str, str]:
        decimals = places(of.value, (of.high - of.low) / 4)
        value, least = show_number(of.value, decimals, signed=True), show_number(of.least, decimals)
        share = f"{100 * of.least / means[of.b]:.0f} % of B" if means[of.b] else ""
        return value, span(of.low, of.high, decimals), stacked(least, share)

    return _pairs_table("A - B", [line.setting.name for line in lines], pairs, tell)


def ratios(over: OverTasks) -> Table:
    """Tabulate the ratios of final returns over tasks for the pairs that :func:`shown` selects."""
    return _pairs_table("A / B", over.names, over.pairs, _ratio)


def _pairs_table(
    what: str,
    names: Sequence[str],
    pairs: Sequence[Difference],
    tell: Callable[[Difference], tuple[str, str, str]],
) -> Table:
    head = ["A", "B", stacked(what, "95 % interval"), stacked("p", "Holm"), "P(A > B)"]
    rows = []
    for each in shown(pairs, len(names)):
        # The better setting comes first.
        pair = each.turned() if each.value < 0 else each
        value, interval, least = tell(pair)
        if pair.significant:
            value = Markup("<strong>{}</strong>").format(value)
        seeds = "paired" if pair.paired else "independent"
        cells = stacked(value, interval), show_p(pair.p), f"{pair.more:.2f}", least, seeds
        rows.append([names[pair.a], names[pair.b], *cells])
    return Table([*head, stacked("least seen", f"power {POWER:g}"), "seeds"], rows)


def _ratio(of: Difference) -> tuple[str, str, str]:
    value, low, high, least = np.exp([of.value, of.low, of.high, of.least])
    return f"{value:.2f}", f"{low:.2f} to {high:.2f}", f"{100 * (least - 1):+.0f} %"


def show_p(p: float) -> str:
    """Format p with at most two significant digits: ``.03``; or as ``< .001``."""
    return "< .001" if p < 0.001 else f"{p:.2g}".removeprefix("0") if p < 1 else "1"


def what_differs(lines: Sequence[Line]) -> Table:
    """Tabulate the keys whose values differ between settings; no rows if all are equal."""
    every = [line.setting.runs[0].settings for line in lines]
    keys, value = differing(every), Markup('<span class="value">{}</span>')
    rows = [
        [line.setting.name, *(value.format(show(of[k])) if k in of else "" for k in keys)]
        for line, of in zip(lines, every, strict=True)
    ]
    return Table(["setting", *keys], rows if keys else [])


def other_jobs(jobs: Iterable[LeftOut]) -> Table:
    """Tabulate the jobs that did not finish, or are not in the statistics."""
    rows = []
    for job in jobs:
        bad = job.state.startswith(("failed", "refused"))
        state = (_BAD if bad else Markup("{}")).format(job.state) + "; counted" * job.counted
        rows.append([state, job.setting, job.seed, job.iterations, job.error, job.folder])
    return Table(["state", "setting", "seed", "iterations", "error", "folder"], rows)


def metrics(runs: Iterable[ReadRun]) -> Iterator[tuple[str, Table]]:
    """Yield, per domain, the names of its tasks and a table of the metrics that its runs have."""
    domains: dict[Domain, list[ReadRun]] = {}
    for run in runs:
        domains.setdefault(run.domain, []).append(run)
    for domain, of in domains.items():
        each = [metric_of(name, domain) for name in recorded_metrics(of)]
        rows = [[m.name, m.title, m.unit, m.what] for m in each]
        names = ", ".join(dict.fromkeys(run.task for run in of))
        yield names, Table(["metric", "title", "unit", "what it is"], rows)
