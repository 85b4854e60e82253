"""Values of seeds as table rows: mean, interval, interquartile mean, the worst; as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.results import table
from klrl.report.statistics import ENOUGH, Array, estimate, iqm


@dataclass(frozen=True)
class Measure:
    """A column."""

    key: str  # in Row.values and in figures.csv
    title: str
    unit: str = ""
    form: str = ",.2f"  # of a number, as Python's format() takes it
    worst: str = "low"  # the "low" seed, the "high" one, the one "far" from 1, or "" for none
    bounds: Sequence[float] = (-inf, inf)  # of what it can be; its interval ends there


@dataclass(frozen=True)
class Row:
    """One setting."""

    labels: Mapping[str, str]
    values: Mapping[str, Array]  # measure -> one number per seed


def worst(values: Array, kind: str) -> float:
    """Return the worst seed's value; see :attr:`Measure.worst`."""
    if kind == "far":
        return float(values[np.abs(values - 1).argmax()])
    return float(np.max(values) if kind == "high" else np.min(values))


def markdown(rows: Sequence[Row], measures: Sequence[Measure]) -> str:
    """Format a line per row: its labels, then a :func:`cell` for each measure."""
    titles = [f"{m.title}, {m.unit}" if m.unit else m.title for m in measures]
    lines = [[*row.labels.values(), *(cell(row, m) for m in measures)] for row in rows]
    return table(escaped([*rows[0].labels, *titles]), map(escaped, lines))


def escaped(line: Iterable[str]) -> list[str]:
    """Escape bars, which would end a cell: KL(policy||base)."""
    return [text.replace("|", r"\|") for text in line]


def cell(row: Row, measure: Measure) -> str:
    """Format ``0.99 [0.98, 1.00], IQM 0.99, worst 0.97``; below five seeds ``0.97 to 1.00, mean``.

    Blank where the row does not have the measure; one number where all seeds print alike.
    """
    if measure.key not in row.values:
        return ""

    def told(value: float) -> str:
        text = format(value, measure.form)
        return text if text.strip("-0.,") else text.lstrip("-")  # no "-0.00"

    values = np.asarray(row.values[measure.key], float)
    mean = told(values.mean())
    if values.min() == values.max():
        return mean
    found = estimate(values)
    assert found is not None
    if len(values) < ENOUGH or found.low is None or found.high is None:
        least, most = told(values.min()), told(values.max())
        return mean if least == most else f"{least} to {most}, mean {mean}"
    low, high = max(found.low, measure.bounds[0]), min(found.high, measure.bounds[1])
    text = f"{mean} [{told(low)}, {told(high)}], IQM {told(float(iqm(values)))}"
    return f"{text}, worst {told(worst(values, measure.worst))}" if measure.worst else text


def read_figures(path: Path) -> list[Row]:
    """Read the rows of a figures.csv: labels before ``measure``, the value of every seed last."""
    found: dict[tuple[str, ...], dict[str, Array]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        names, *lines = csv.reader(file)
    end = names.index("measure")
    for line in lines:
        values = found.setdefault(tuple(line[1:end]), {})
        values[line[end]] = np.array(line[-1].split(), float)
    return [Row(dict(zip(names[1:end], each, strict=True)), of) for each, of in found.items()]
