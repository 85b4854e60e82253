"""``klrl ls [FOLDER]``: lists runs and sweeps with their progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from klrl.base.digits import mean_and_error
from klrl.base.files import expanded
from klrl.base.screen import show_table
from klrl.cli.wrapper import Parser
from klrl.domains import Domain
from klrl.report.listing import Entry, entries


def ls_command(argv: list[str]) -> int:
    """Print a line for each run and each sweep of a folder; return the exit code."""
    args = parser().parse_args(argv)
    folder = expanded(args.folder)
    listed = entries(folder)
    if args.json:
        print(json.dumps([_as_json(entry) for entry in listed], indent=1))
    elif listed:
        _show(listed, folder)
    else:
        print(f"{args.folder}: no runs")
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl ls",
        description="List the runs and sweeps of a folder, or the jobs of a sweep, newest last.",
    )
    parser.add_argument(
        "folder", nargs="?", default="outputs", metavar="FOLDER", help="default: outputs"
    )
    parser.add_flag("--json", "print one JSON list")
    return parser


def _show(listed: Sequence[Entry], folder: Path) -> None:
    """Print a line per entry; add the column ``best`` if a run has a best checkpoint."""
    scores = dict.fromkeys(entry.domain.score for entry in listed if entry.score is not None)
    score, best = ", ".join(scores) or "return", any(entry.best is not None for entry in listed)
    head = ["", "state", "progress", "", score, *["best"] * best, "KL(ref)", "started", ""]
    rows = [_cells(entry, folder, best=best) for entry in listed]
    show_table([head, *rows], right=range(2, 6 + best))


def _cells(entry: Entry, folder: Path, *, best: bool) -> list[str]:
    progress = percent = ""
    if entry.unit:
        total = "" if entry.total is None else f"/{entry.total:,}"
        progress = f"{entry.done:,}{total} {entry.unit}"
    if entry.unit and entry.total:
        # Rounded down, so that only a finished entry shows 100 %. ``done`` may exceed the total.
        percent = f"{min(100 * entry.done // entry.total, 100)}%"
    return [
        entry.path.name if entry.path == folder else str(entry.path.relative_to(folder)),
        entry.state,
        progress,
        percent,
        _scored(entry.score, entry.error, entry.domain),
        *[_scored(entry.best, entry.best_error, entry.domain)] * best,
        entry.kl_shown,
        _local(entry.started),
        entry.note or ", ".join(f"{count} {state}" for state, count in entry.jobs.items()),
    ]


def _scored(value: float | None, error: float | None, domain: Domain) -> str:
    return "" if value is None else mean_and_error(value, error, domain.digits)


def _local(started: str | None) -> str:
    """Format a time in the local time zone, to the minute."""
    try:
        return datetime.fromisoformat(started or "").astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError):
        return ""


def _as_json(entry: Entry) -> dict[str, Any]:
    """Convert an entry for JSON. A sweep has ``jobs``; a run has returns and ``kl``."""
    shared: dict[str, Any] = {"path": str(entry.path), "state": entry.state, "unit": entry.unit}
    shared |= {"done": entry.done, "total": entry.total, "started": entry.started}
    own: dict[str, Any] = {"jobs": entry.jobs}
    if entry.unit != "jobs":
        own = {"return": entry.score, "return_se": entry.error, "best_return": entry.best}
        own |= {"best_return_se": entry.best_error, "kl": entry.kl}
    return {**shared, **own, "note": entry.note}
