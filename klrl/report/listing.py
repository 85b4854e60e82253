"""The entries of ``klrl ls``: the runs and sweeps below a folder with their progress. No torch.

Only the end of each ``metrics.jsonl`` is read, so that a thousand runs take a second or two.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError, first_line
from klrl.base.text import warn
from klrl.domains import CONTROL, Domain, recorded_domain
from klrl.report.sweeps import Planned, Sweep, Unreadable, read_sweep, walk
from klrl.runs.folder import UNREADABLE, RunFolder, read_settings, why_unreadable
from klrl.runs.returns import final_return
from klrl.runs.rows import parse_row
from klrl.sweep.sweep_file import SWEEP_FILE

#: The state of a sweep is the first of these that one of its jobs has.
_STATES = ("running", "failed", "refused", "broken", "interrupted", "waiting", "finished")
#: A run, or a sweep, whose files cannot be read.
BROKEN = "broken"
_BLOCK = 1 << 15
#: How many rows are searched for a return, where evaluations are not further apart.
_ROWS = 100
#: How many at most where klrl chooses when to evaluate: a tenth of a run of 10,000 iterations.
_SCHEDULED = 1_000


@dataclass(frozen=True)
class Entry:
    """One line of the list: a run, a sweep, or a job of a sweep that has not begun."""

    path: Path
    state: str  # running, finished, interrupted, failed, refused, waiting, or broken
    unit: str = ""  # of the progress: frames, samples, or the jobs of a sweep
    domain: Domain = CONTROL
    done: int = 0
    total: int | None = None  # at the end; None if it is unknown
    score: float | None = None
    error: float | None = None  # its standard error, of an evaluation of several episodes
    best: float | None = None  # the return of the best checkpoint, in the closing evaluation
    best_error: float | None = None
    kl: float | None = None  # the last KL(policy||reference), nats
    started: str | None = None  # in ISO 8601; None if it has not begun
    note: str = ""  # an error, in one line
    jobs: dict[str, int] = field(default_factory=dict)  # a sweep's: state -> number of jobs


def entries(folder: Path) -> list[Entry]:
    """The runs and sweeps of a folder, the newest last; for a sweep's folder, its jobs in order."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {what}; give a folder of runs, as outputs")
    if (folder / SWEEP_FILE).is_file():
        return _jobs_of(folder)
    unsorted = [
        _run(path) if is_run else _sweep(path) for path, is_run in walk(folder, into_sweeps=False)
    ]
    return sorted(unsorted, key=lambda entry: (_seconds(entry), entry.path))


def _jobs_of(folder: Path) -> list[Entry]:
    """The jobs of a sweep, and other runs in its folder."""
    try:
        planned = read_sweep(folder).jobs
    except Unreadable as error:
        return [Entry(folder, BROKEN, note=first_line(error)), *map(_run, _runs_in(folder))]
    listed = {job.folder for job in planned}
    unlisted = [path for path in _runs_in(folder) if path not in listed]
    return [*map(_job, planned), *map(_run, unlisted)]


def _runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _seconds(entry: Entry) -> float:
    """When it started, or, if that is unknown, when its folder was last written to."""
    try:
        return datetime.fromisoformat(entry.started or "").timestamp()
    except (ValueError, OverflowError):
        return entry.path.stat().st_mtime if entry.path.exists() else 0.0


# --------------------------------------------------------------------------------------- sweeps


def _sweep(folder: Path) -> Entry:
    """A sweep in one entry; the status of its jobs is in their manifests, newer than its own."""
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
    """A job's state, and its manifest if it was begun."""
    if not job.begun:
        return ("waiting" if job.status == "running" else job.status), {}
    run = RunFolder(job.folder)
    try:
        return run.status, run.manifest
    except UNREADABLE:
        return BROKEN, {}


def _job(job: Planned) -> Entry:
    """One job of a sweep: its run, or its state without one."""
    if job.begun:
        return _run(job.folder)
    return Entry(job.folder, _state(job)[0], note=job.error.partition("\n")[0])


# ----------------------------------------------------------------------------------------- runs


def _run(folder: Path) -> Entry:
    try:
        return _read_run(folder)
    except UNREADABLE as error:
        return Entry(folder, BROKEN, note=why_unreadable(error))


def _read_run(folder: Path) -> Entry:
    run = RunFolder(folder)
    manifest, state = run.manifest, run.status
    settings = read_settings(folder)
    notes = [str(manifest.get("error") or "").partition("\n")[0]]
    evals = settings.get("eval") or {}
    every = _SCHEDULED if evals.get("evaluations") else 0
    if evals.get("every") is not None:
        every = int(evals["every"])
    row = last_values(run.metrics, every, say=notes.append)
    notes += _foreign_end(run.metrics, manifest.get("id"))
    domain = recorded_domain(manifest)
    frames = settings.get("frames")
    return Entry(
        folder,
        state,
        unit=domain.axis,
        domain=domain,
        done=int(row.get(domain.axis, 0)),
        total=None if frames is None else int(float(frames)),
        score=final_return(row),
        error=row.get("eval/return_se") if "eval/return" in row else None,
        best=row.get("eval/best_return"),
        best_error=row.get("eval/best_return_se"),
        kl=row.get("kl/ref/exact"),
        started=manifest.get("started"),
        note="; ".join(filter(None, notes)),
    )


def _foreign_end(path: Path, run: str | None) -> list[str]:
    """What is wrong with the last rows: they are another run's, or come twice, or backwards."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _BLOCK, 0))
        end = file.read()
    named = {each.decode() for each in re.findall(rb'"run": "(\w*)"', end)}
    at = [int(each) for each in re.findall(rb'"iteration": (\d+)', end)]
    told = ["are another run's"] if run is not None and named - {run} else []
    told += ["do not follow those before"] if at != sorted(set(at)) else []
    return [f"{path.name}: rows near its end {each}" for each in told]


def last_values(path: Path, every: int, say: Callable[[str], None] = warn) -> dict[str, float]:
    """The last row of a ``metrics.jsonl``, with the last returns before it; empty without the file.

    A row has a return only if an episode ended in its rollout, or if it was evaluated: every
    ``every`` iterations, 0 for never.
    """
    if not path.is_file():
        return {}
    last: dict[str, float] = {}
    returns: dict[str, float] = {}
    bad = 0
    wanted = ["reward/episode", *(["eval/return"] if every else [])]
    for count, line in enumerate(_lines_backwards(path)):
        # Only rows with a needed value are parsed: parsing takes most of the time.
        if not last or any(f'"{name}"'.encode() in line for name in wanted):
            row = parse_row(line) or {}
            last = last or row
            found = [each for name in wanted if name in row for each in (name, f"{name}_se")]
            returns = {name: row[name] for name in found if name in row} | returns
            wanted = [name for name in wanted if name not in returns]
        else:
            row = {} if line[:1] + line[-1:] != b"{}" else last
        bad += count > 0 and not row  # what follows the last line end is being written
        if not wanted or count >= max(every, _ROWS):
            break
    if bad:
        say(f"{path.name}: lines that are no rows near its end: {bad}")
    return {**last, **returns}


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, last line first, read in blocks."""
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
