"""Sweeps as a user starts them, and what their folders hold."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from klrl.config import SubmititConfig
from klrl.runs.folder import RunFolder
from klrl.runs.rows import read_rows
from tests.conftest import QUICK
from tests.runs.commands import exits

FOLDER = Path("outputs/a")
SLURM = SubmititConfig("slurm", 10, 1, 0, 1.0, 5, None, {}, name="submitit")


def sweep(*words: str) -> int:
    return exits("-m", "sweep=a", *QUICK, *words)


def jobs_of(folder: str = "outputs/a") -> dict[str, RunFolder]:
    return {p.parent.name: RunFolder(p.parent) for p in Path(folder).glob("*/manifest.json")}


def changed(run: RunFolder) -> int:
    return (run.path / "manifest.json").stat().st_mtime_ns


def told(folder: str = "outputs/a") -> dict[str, str]:
    jobs = json.loads(Path(folder, "sweep.json").read_text(encoding="utf-8"))["jobs"]
    return {job["name"]: job["status"] for job in jobs}


def frames_of(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    return [row["frames"] for row in read_rows(metrics)] if metrics.exists() else []


def resumed_at(name: str) -> list[int]:
    """The frames from which a job's log says that it went on."""
    log = FOLDER / name / "log.txt"
    said = log.read_text(encoding="utf-8") if log.exists() else ""
    return [int(n.replace(",", "")) for n in re.findall(r"resumed at ([\d,]+) frames", said)]


def wait_for(
    condition: Callable[[], object], seconds: float = 120, about: Callable[[], object] = str
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come; {about()}"
        time.sleep(0.02)
