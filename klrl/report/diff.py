"""``klrl diff RUN RUN``: compares two runs side by side, or checks that they are bit-equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.text import text_table
from klrl.report.measures import final, recorded_metrics
from klrl.report.runs import ReadRun
from klrl.report.settings import differing, show
from klrl.runs.metrics import TIMES, Metric, Row, metric_of
from klrl.runs.rows import read_rows

#: Manifest entries to compare, in addition to settings and metrics.
_FACTS = (
    *("status", "seed", "klrl", "numerics", "python"),
    *("device", "compile", "collector", "git_commit"),
)


#: Rows of a table: name, value in each run, difference (only of metrics).
Rows = list[tuple[str, str, str, str]]


def compare(first: ReadRun, second: ReadRun) -> dict[str, Rows]:
    """Tabulate the settings and versions that differ, and the final value of every metric."""
    settings = _unequal(first.settings, second.settings)
    return {
        "settings": [row for row in settings if row[0] != "numerics"],
        "circumstances": _unequal(_facts(first), _facts(second)),
        "metrics, mean of the last tenth of the iterations": _metrics(first, second),
    }


def _facts(run: ReadRun) -> dict[str, object]:
    facts = {key: run.manifest[key] for key in _FACTS if key in run.manifest}
    if len(planned := run.manifest.get("planned") or []) > 1:
        facts["planned"] = planned
    commit = facts.get("git_commit")
    if commit:
        # Keep twelve digits, and the + that marks uncommitted changes.
        facts["git_commit"] = commit[:12] + "+" * commit.endswith("+")
    return {**facts, "status": run.status, "seed": run.seed, **(run.manifest.get("versions") or {})}


def _unequal(first: Mapping[str, object], second: Mapping[str, object]) -> Rows:
    rows = []
    for key in differing([dict(first), dict(second)]):
        left, right = (show(each[key]) if key in each else "-" for each in (first, second))
        rows.append((key, left, right, ""))
    return rows


def _metrics(first: ReadRun, second: ReadRun) -> Rows:
    """Tabulate all metrics of either run; the difference is the second minus the first."""
    rows = []
    for name in recorded_metrics([first, second]):
        left, right = (final(r, name) if name in r.columns else None for r in (first, second))
        metric = metric_of(name, first.domain)
        change = "" if left is None or right is None else metric.show(right - left, signed=True)
        rows.append((name, _shown(metric, left), _shown(metric, right), change))
    return rows


def _shown(metric: Metric, value: float | None) -> str:
    return "-" if value is None else metric.show(value)


def as_text(tables: Mapping[str, Rows]) -> str:
    """Format the tables as text with aligned columns."""
    return "\n\n".join(
        f"{title}:\n{text_table(rows or [('nothing differs',)], right=(1, 2), indent=2)}"
        for title, rows in tables.items()
    )


#: Checkpoint components to compare: all parameters, and the optimizer's moments.
_COMPARED = ("agent", "reference", "optimizer")


def compare_bits(first: Path, second: Path) -> tuple[bool, str]:
    """Compare all metrics except times, and the tensors of the last checkpoints, bit by bit.

    Returns False and the first difference or, if there is none, True and what was compared.
    """
    rows = _rows(first), _rows(second)
    difference = next(differences(*rows), None)
    if difference is not None:
        return False, difference
    equal, told = _compare_parameters(first, second)
    return equal, f"equal to the bit: {len(rows[0])} rows; {told}" if equal else told


def _rows(run: Path) -> list[Row]:
    path = run / "metrics.jsonl"
    try:
        return read_rows(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give another run") from error


def differences(first: Sequence[Row], second: Sequence[Row]) -> Iterator[str]:
    """Yield a line per value that differs, row by row; times are not compared."""
    for number, (mine, other) in enumerate(zip_longest(first, second), 1):
        if mine is None or other is None:
            runs = ("first", "second") if other is None else ("second", "first")
            count = min(len(first), len(second))
            yield f"row {number}: only the {runs[0]} run has it, the {runs[1]} ends at {count}"
            return
        for name in [*mine, *(name for name in other if name not in mine)]:
            values = [repr(row[name]) if name in row else "absent" for row in (mine, other)]
            if name not in TIMES and values[0] != values[1]:
                where = f"iteration {mine.get('iteration', number)}"
                yield f"{where}: {name} is {values[0]} and {values[1]}"


def _compare_parameters(first: Path, second: Path) -> tuple[bool, str]:
    from klrl.runs.checkpoint import digests  # imports torch

    told = [digests(run, "last", _COMPARED) for run in (first, second)]
    for run, held in zip((first, second), told, strict=True):
        if held is None:
            return True, f"parameters not compared: {run} has no complete checkpoint of this format"
    (frames, mine), (others, theirs) = [held for held in told if held is not None]
    if frames != others:
        return False, f"rows are equal, but the last checkpoints are at {frames:,} and {others:,}"
    for name in _COMPARED:
        if mine.get(name) != theirs.get(name):
            return False, f"rows are equal, but at {frames:,} the last checkpoints differ in {name}"
    return True, f"parameters at {frames:,}, SHA-256 {mine.get('agent', '-')[:12]}"
