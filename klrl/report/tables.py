"""Makes the page's tables of text and markup; ``page.html`` lays them out and escapes the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from klrl.base.digits import number, places, show, span
from klrl.report.differences import Difference
from klrl.report.equal_kl import equal_kl
from klrl.report.measures import kl_metric, last, measures
from klrl.report.settings import Setting
from klrl.report.statistics import Estimate
from klrl.runs.metrics import metric_of


class Table(NamedTuple):
    """A table; the first cell of a row is its header."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_html(table: Table) -> Markup:
    """Format a table for a notebook."""
    row, head, cell = (Markup(f"<{of}>{{}}</{of}>") for of in ("tr", "th", "td"))
    rows = [row.format(Markup().join(map(head.format, table.head)))]
    rows += [row.format(Markup().join(map(cell.format, each))) for each in table.rows]
    text = Markup("<table>{}</table>").format(Markup().join(rows))
    return text.replace("<small>", Markup("<br><small>"))


def stacked(text: str, *below: str) -> Markup:
    """Make a cell: ``text``, and below it a small line for each non-empty text in ``below``."""
    small = Markup("<small>{}</small>")
    return escape(text) + Markup().join(small.format(each) for each in below if each)


def results(settings: Sequence[Setting]) -> Table:
    """Tabulate every measure that a setting has: scores, KLs, coefficients."""
    every = measures([run for setting in settings for run in setting.runs])
    every = [each for each in every if each.key != "eval_error"]
    some = [each for each in every if any(of.estimates[each.key] for of in settings)]
    heads = [
        stacked(m.metric.title, m.metric.unit, "last" if m.of is last else "final") for m in some
    ]
    rows = [[of.name, of.finished, *(_measured(of, m.key) for m in some)] for of in settings]
    return Table(["setting", stacked("seeds", "finished"), *heads], rows)


def _measured(setting: Setting, key: str) -> Markup:
    """Make the cell of a measure; if some seeds lack the measure, say how many have it."""
    value, runs, more = setting.estimates[key], len(setting.runs), ""
    if value is None:
        return Markup()
    decimals = places(value.value, value.error)
    if key == "return" and value.least < value.most:
        more = f"IQM {show(value.iqm, decimals)}, worst {show(value.least, decimals)}"
    if key == "eval_return" and (error := setting.estimates.get("eval_error")):
        more = f"+- {number(error.value, 2)} in a seed"
    return _estimate(value) + stacked("", more, f"{value.seeds} of {runs}" * (value.seeds < runs))


def _estimate(value: Estimate | None) -> Markup:
    """Make a cell: mean above interval; with fewer than five seeds, range above mean."""
    if value is None:
        return Markup()
    decimals = places(value.value, value.error)
    mean = show(value.value, decimals)
    # Show only the mean of one seed, or of equal values, such as a fixed coefficient.
    if value.least == value.most:
        return escape(mean)
    if value.low is None or value.high is None:
        return stacked(span(value.least, value.most, decimals), f"mean {mean}")
    return stacked(mean, span(value.low, value.high, decimals))


def at_equal_kl(settings: Sequence[Setting]) -> Table:
    """Tabulate the return at equal KL, one row per family of runs; no rows if there is none."""
    runs = [run for setting in settings for run in setting.runs]
    unit = metric_of(kl_metric(runs), runs[0].domain).unit
    levels, families = equal_kl(settings)
    heads = [stacked(f"KL = {number(each, 3)}", unit) for each in levels]
    rows = [[name, *map(_estimate, row)] for name, row in families.items()]
    return Table(["family", *heads], rows)


def differences(settings: Sequence[Setting], pairs: Sequence[Difference]) -> Table:
    """Tabulate the differences of final returns."""
    rows = []
    for pair in pairs:
        decimals = places(pair.value, (pair.high - pair.low) / 4)
        value = show(pair.value, decimals, signed=True)
        if pair.significant:
            value = Markup("<strong>{}</strong>").format(value)
        names = [settings[i].name for i in (pair.a, pair.b)]
        cell = stacked(value, span(pair.low, pair.high, decimals))
        p = stacked(show_p(pair.p), "paired" * pair.paired)
        rows.append([*names, cell, p, f"{pair.more:.2f}"])
    what = stacked("A - B", "95 % interval")
    return Table(["A", "B", what, stacked("p", "Holm"), "P(A > B)"], rows)


def show_p(p: float) -> str:
    """Format p with at most two significant digits: ``.03``; or as ``< .001``."""
    return "< .001" if p < 0.001 else f"{p:.2g}".removeprefix("0") if p < 1 else "1"
