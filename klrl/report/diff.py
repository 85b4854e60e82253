"""Two runs side by side: ``klrl diff RUN RUN``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from klrl.base.text import text_table
from klrl.report.measures import final, recorded_metrics
from klrl.report.runs import ReadRun, read_run
from klrl.report.settings import differing, show
from klrl.runs.find import find_manifest
from klrl.runs.metrics import Metric, metric_of

#: Entries of the manifest that are compared, besides settings and metrics.
_FACTS = ("status", "seed", "klrl", "numerics", "python", "device", "compile", "git_commit")


@dataclass(frozen=True)
class Part:
    """One table."""

    title: str
    rows: list[tuple[str, str, str, str]]  # name, first run, second run, difference (of numbers)


def compare(first: ReadRun, second: ReadRun) -> list[Part]:
    """Settings and versions that differ, and the final value of every metric."""
    return [
        Part("settings", _unequal(_settings(first), _settings(second))),
        Part("circumstances", _unequal(_facts(first), _facts(second))),
        Part("metrics, mean of the last tenth of the iterations", _metrics(first, second)),
    ]


def _settings(run: ReadRun) -> dict[str, object]:
    """All but the version of the arithmetic, which is among the circumstances."""
    return {key: value for key, value in run.settings.items() if key != "numerics"}


def _facts(run: ReadRun) -> dict[str, object]:
    facts = {key: run.manifest[key] for key in _FACTS if key in run.manifest}
    commit = facts.get("git_commit")
    if commit:
        # Twelve digits, and the + of a tree with changes.
        facts["git_commit"] = commit[:12] + "+" * commit.endswith("+")
    return {**facts, "status": run.status, "seed": run.seed, **run.manifest.get("versions", {})}


def _unequal(
    first: Mapping[str, object], second: Mapping[str, object]
) -> list[tuple[str, str, str, str]]:
    rows = []
    for key in differing([dict(first), dict(second)]):
        left, right = (show(each[key]) if key in each else "-" for each in (first, second))
        rows.append((key, left, right, ""))
    return rows


def _metrics(first: ReadRun, second: ReadRun) -> list[tuple[str, str, str, str]]:
    """All metrics of either run; the difference is the second minus the first."""
    rows = []
    for name in recorded_metrics([first, second]):
        left, right = (final(r, name) if name in r.columns else None for r in (first, second))
        metric = metric_of(name, first.domain)
        change = "" if left is None or right is None else metric.show(right - left, signed=True)
        rows.append((name, _shown(metric, left), _shown(metric, right), change))
    return rows


def _shown(metric: Metric, value: float | None) -> str:
    return "-" if value is None else metric.show(value)


def as_text(parts: Iterable[Part]) -> str:
    """The tables in columns of equal width."""
    blocks = []
    for part in parts:
        rows = part.rows or [("nothing differs", "", "", "")]
        blocks.append(f"{part.title}:\n{text_table(rows, right=(1, 2), indent=2)}")
    return "\n\n".join(blocks)


def read(path: str) -> ReadRun:
    """One run, by its folder."""
    return read_run(find_manifest(path, "RUN"))
