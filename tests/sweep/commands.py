"""Sweeps as a user starts them, and what their folders hold."""

from __future__ import annotations

import json
import time
from pathlib import Path

from klrl.runs.folder import RunFolder
from klrl.runs.metrics import TIMES
from klrl.runs.rows import read_rows
from tests.conftest import QUICK
from tests.runs.commands import exits


def sweep(*words: str) -> int:
    return exits("-m", "sweep=a", *QUICK, *words)


def jobs_of(folder: str = "outputs/a") -> dict[str, RunFolder]:
    return {p.parent.name: RunFolder(p.parent) for p in Path(folder).glob("*/manifest.json")}


def timeless(run: RunFolder) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_rows(run.metrics)]


def changed(run: RunFolder) -> int:
    return (run.path / "manifest.json").stat().st_mtime_ns


def told(folder: str = "outputs/a") -> dict[str, str]:
    jobs = json.loads(Path(folder, "sweep.json").read_text(encoding="utf-8"))["jobs"]
    return {job["name"]: job["status"] for job in jobs}


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
