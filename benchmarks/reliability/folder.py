"""What a run folder holds: its parts, its checkpoints, its rows, its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

#: What is written -> whether a path, within the run folder, belongs to it.
PARTS: dict[str, Callable[[Path], bool]] = {
    "save": lambda path: path.parts[0] == "checkpoints",
    "metrics": lambda path: path.name.lstrip(".").startswith("metrics."),
    "manifest": lambda path: len(path.parts) == 1 and path.name.lstrip(".").startswith("manifest."),
    "curves": lambda path: path.name.lstrip(".").startswith("curves."),
    "settings": lambda path: path.parts[0].startswith(".hydra"),
}
OTHER = "other files"


def part_of(path: Path) -> str:
    """The part of the run folder that a path within it belongs to."""
    return next((name for name, holds in PARTS.items() if holds(path)), OTHER)


def whole_entries(run: Path) -> list[int]:
    """The frames of the entries of ``last`` that every file of which is as it was written."""
    from klrl.runs.entry import CheckpointEntry, DamagedEntry

    frames = []
    for path in (run / "checkpoints" / "last").glob("frames-*"):
        try:
            entry = CheckpointEntry(path)
            entry.check()
        except DamagedEntry:
            continue
        frames.append(entry.frames)
    return sorted(frames)


def iterations(run: Path) -> list[int]:
    """Of the rows of ``metrics.jsonl``, each line of which must be one."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


def readable_rows(run: Path) -> list[int]:
    """The iterations of those lines of ``metrics.jsonl`` that are rows."""
    recorded = []
    for line in (run / "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            recorded.append(json.loads(line)["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
    return recorded


def names(run: Path) -> set[str]:
    """Everything in a run folder; which evaluation was the best depends on where it went on."""
    listed = (str(path.relative_to(run)) for path in run.rglob("*"))
    return {re.sub(r"best/frames-\d+", "best/frames", name) for name in listed}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Name -> content of every file."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
