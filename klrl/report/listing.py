"""The runs and sweeps below a folder, and how far each has come: what ``klrl ls`` shows. No torch.

Of ``metrics.jsonl`` only the end is read, so that a thousand runs take a second or two.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError, first_line
from klrl.domains import CONTROL, Domain, recorded_domain
from klrl.report.sweeps import Planned, Sweep, Unreadable, read_sweep, walk
from klrl.runs.folder import BrokenRun, RunFolder, read_settings
from klrl.runs.metrics import final_return
from klrl.sweep.ledger import SWEEP_FILE

#: The state of a sweep is the first of these that one of its jobs has.
_STATES = ("running", "failed", "refused", "broken", "interrupted", "waiting", "finished")
#: A run, or a sweep, whose files cannot be read.
BROKEN = "broken"
_BLOCK = 1 << 15
#: So many rows are searched for a return, where no evaluation tells how far back one is.
_ROWS = 100


@dataclass(frozen=True)
class Entry:
    """One line of the list: a run, a sweep, or a job of a sweep that has not begun.

    Attributes:
        path: its folder.
        state: running, finished, interrupted, failed, refused, waiting, or broken.
        unit: what is counted: frames, samples, or jobs of a sweep.
        domain: of a run.
        done: how many there are so far.
        total: how many there will be; None where that cannot be told.
        score: the return of the last evaluation, else of the last episodes of training.
        kl: the last KL(policy||reference), nats.
        started: in ISO 8601; None where it has not begun.
        note: an error, in a line.
        jobs: of a sweep: state -> how many.
    """

    path: Path
    state: str
    unit: str = ""
    domain: Domain = CONTROL
    done: int = 0
    total: int | None = None
    score: float | None = None
    kl: float | None = None
    started: str | None = None
    note: str = ""
    jobs: dict[str, int] = field(default_factory=dict)


def entries(folder: Path) -> list[Entry]:
    """What lies in a folder, the newest last; of a sweep's folder, its jobs in their order.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {what}; give a folder of runs, as outputs")
    if (folder / SWEEP_FILE).is_file():
        return _jobs_of(folder)
    found = [
        _run(path) if is_run else _sweep(path) for path, is_run in walk(folder, into_sweeps=False)
    ]
    return sorted(found, key=lambda entry: (_seconds(entry), entry.path))


def _jobs_of(folder: Path) -> list[Entry]:
    """The jobs of a sweep, and whatever runs lie beside them."""
    try:
        planned = read_sweep(folder).jobs
    except Unreadable as error:
        return [Entry(folder, BROKEN, note=first_line(error)), *map(_run, _runs_in(folder))]
    listed = {job.folder for job in planned}
    others = [path for path in _runs_in(folder) if path not in listed]
    return [*map(_job, planned), *map(_run, others)]


def _runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _seconds(entry: Entry) -> float:
    """When it was started; of a broken one, when its folder was last written to."""
    try:
        return datetime.fromisoformat(entry.started or "").timestamp()
    except ValueError:
        return entry.path.stat().st_mtime if entry.path.exists() else 0.0


# --------------------------------------------------------------------------------------- sweeps


def _sweep(folder: Path) -> Entry:
    """A sweep in one entry; its jobs' manifests know better than ``sweep.json`` how they stand."""
    try:
        sweep: Sweep = read_sweep(folder)
    except Unreadable as error:
        return Entry(folder, BROKEN, note=first_line(error))
    states: Counter[str] = Counter()
    starts = []
    for job in sweep.jobs:
        state, manifest = _state(job)
        states[state] += 1
        starts.append(str(manifest.get("started") or ""))
    known = [state for state in _STATES if states[state]]
    return Entry(
        folder,
        known[0] if known else (next(iter(states), "waiting")),
        unit="jobs",
        done=states["finished"],
        total=len(sweep.jobs),
        started=min(filter(None, starts), default=None),
        jobs=dict(sorted(states.items())),
    )


def _state(job: Planned) -> tuple[str, dict[str, Any]]:
    """How a job stands, and its manifest where it was begun."""
    if not job.begun:
        return ("waiting" if job.status == "running" else job.status), {}
    run = RunFolder(job.folder)
    try:
        return run.status, run.manifest
    except (OSError, BrokenRun):
        return BROKEN, {}


def _job(job: Planned) -> Entry:
    """One job of a sweep: its run, or that it waits."""
    if job.begun:
        return _run(job.folder)
    return Entry(job.folder, _state(job)[0], note=job.error.partition("\n")[0])


# ----------------------------------------------------------------------------------------- runs


def _run(folder: Path) -> Entry:
    try:
        return _read_run(folder)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return Entry(folder, BROKEN, note=first_line(error))


def _read_run(folder: Path) -> Entry:
    """One run.

    Raises:
        BrokenRun: a file of it is broken; the text names the file.
        OSError: a file of it cannot be read.
    """
    run = RunFolder(folder)
    manifest, state = run.manifest, run.status
    settings = read_settings(folder)
    row = last_values(run.metrics, int((settings.get("eval") or {}).get("every") or 0))
    domain = recorded_domain(manifest, row)
    frames = settings.get("frames")
    return Entry(
        folder,
        state,
        unit=domain.axis,
        domain=domain,
        done=int(row.get(domain.axis, 0)),
        total=None if frames is None else int(float(frames)),
        score=final_return(row),
        kl=row.get("kl/ref/exact"),
        started=manifest.get("started"),
        note=str(manifest.get("error") or "").partition("\n")[0],
    )


def last_values(path: Path, every: int) -> dict[str, float]:
    """The last row of a ``metrics.jsonl``, with the last returns that came before it.

    A row has a return only where an episode ended in its rollout, or where it was evaluated.

    Args:
        path: the file; empty where it does not exist.
        every: iterations between evaluations; 0 where there are none.
    """
    if not path.exists():
        return {}
    last: dict[str, float] = {}
    returns: dict[str, float] = {}
    wanted = ["reward/episode", *(["eval/return"] if every else [])]
    for count, line in enumerate(_lines_backwards(path)):
        # Parsed only where there is something to be had: that is most of the time it takes.
        if not last or any(f'"{name}"'.encode() in line for name in wanted):
            row = _row(line)
            last = last or row
            returns = {name: row[name] for name in wanted if name in row} | returns
            wanted = [name for name in wanted if name not in returns]
        if not wanted or count >= max(every, _ROWS):
            break
    return {**last, **returns}


def _row(line: bytes) -> dict[str, float]:
    """The row of a line; empty for what is none, as a last line that was cut off."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file from its end, read in blocks."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest = b""
        while start > 0:
            size = min(_BLOCK, start)
            start -= size
            file.seek(start)
            first, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
            rest = first
        yield rest
