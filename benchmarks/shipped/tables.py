"""Values of seeds as table rows: mean, interval, interquartile mean, the worst; CSV, Markdown."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from klrl.report.statistics import ENOUGH, Array, Estimate, estimate, iqm


@dataclass(frozen=True)
class Measure:
    """A column."""

    key: str  # in Row.values and in the CSV
    title: str  # in the table
    unit: str = ""
    form: str = ",.2f"  # of a number, as Python's format() takes it
    worst: str = "low"  # the "low" seed, the "high" one, the one "far" from 1, or "" for none
    bounds: tuple[float, float] = (-inf, inf)  # of what it can be; its interval ends there


@dataclass(frozen=True)
class Row:
    """One setting."""

    labels: Mapping[str, str]
    values: Mapping[str, Array]  # measure -> one number per seed

    def estimate(self, key: str) -> Estimate:
        """Over the seeds."""
        found = estimate(np.asarray(self.values[key], float))
        assert found is not None, f"{key} of {dict(self.labels)}: no seed has it"
        return found


def worst(values: Array, kind: str) -> float:
    """The worst seed's value; see :attr:`Measure.worst`."""
    if kind == "far":
        return float(values[np.abs(np.asarray(values) - 1).argmax()])
    return float(np.max(values) if kind == "high" else np.min(values))


def markdown(rows: Sequence[Row], measures: Sequence[Measure]) -> str:
    """A line per row: its labels, then a :func:`cell` for each measure."""
    names = list(rows[0].labels)
    titles = [f"{m.title}, {m.unit}" if m.unit else m.title for m in measures]
    lines = [[*names, *titles], ["---"] * (len(names) + len(measures))]
    for row in rows:
        lines.append([*row.labels.values(), *(cell(row, m) for m in measures)])
    # A bar inside a cell would end it: KL(policy||base).
    escaped = [[text.replace("|", "\\|") for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def cell(row: Row, measure: Measure) -> str:
    """``0.99 [0.98, 1.00], IQM 0.99, worst 0.97``; below five seeds ``0.97 to 1.00, mean 0.99``.

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
    low, high = interval(row, measure.key, measure.bounds)
    if low is None or high is None:
        least, most = told(values.min()), told(values.max())
        return mean if least == most else f"{least} to {most}, mean {mean}"
    text = f"{mean} [{told(low)}, {told(high)}], IQM {told(float(iqm(values)))}"
    return f"{text}, worst {told(worst(values, measure.worst))}" if measure.worst else text


def interval(
    row: Row, key: str, bounds: tuple[float, float] = (-inf, inf)
) -> tuple[float, float] | tuple[None, None]:
    """The report's interval of a measure, within bounds; Nones below :data:`ENOUGH` seeds."""
    found = row.estimate(key)
    if found.seeds < ENOUGH or found.low is None or found.high is None:
        return None, None
    return max(found.low, bounds[0]), min(found.high, bounds[1])


def write_csv(rows: Sequence[Row], measures: Sequence[Measure], path: Path) -> None:
    """A line per setting and measure in full precision, the value of every seed at its end."""
    names = list(dict.fromkeys(name for row in rows for name in row.labels))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, "measure", "unit", "mean", "low", "high", "iqm", "worst", "seeds"])
        for row in rows:
            for m in measures:
                if m.key not in row.values:
                    continue
                values = np.asarray(row.values[m.key], float)
                bad = worst(values, m.worst) if m.worst else ""
                seeds = " ".join(f"{value:.7g}" for value in values)
                labels = [row.labels.get(name, "") for name in names]
                middle = [values.mean(), *interval(row, m.key, m.bounds), iqm(values)]
                writer.writerow([*labels, m.key, m.unit, *middle, bad, seeds])
