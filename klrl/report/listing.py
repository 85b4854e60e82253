"""Lists the runs and sweeps below a folder with their progress, for ``klrl ls``; without torch.

Only the end of each ``metrics.jsonl`` is parsed, so that a thousand runs take a second or two.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import ROWS
from klrl.base.text import warn
from klrl.domains import CONTROL, Domain, recorded_domain
from klrl.runs.folder import UNREADABLE, RunFolder, read_settings, why_unreadable
from klrl.runs.metrics import Row
from klrl.runs.returns import final_return, shown_kl
from klrl.runs.rows import each_row, parse_row
from klrl.sweep.sweep_file import SWEEP_FILE, JobEntry, SweepFile

#: The state of a sweep is the first in this list that one of its jobs has.
_STATES = ("running", "failed", "refused", "broken", "interrupted", "waiting", "finished")
#: State of a run or sweep whose files cannot be read.
BROKEN = "broken"
#: Number of bytes at the end of a ``metrics.jsonl`` that are parsed.
_END = 1 << 17
_RETURNS = ("reward/episode", "eval/return")


@dataclass(frozen=True)
class Entry:
    """One line of the list: a run, a sweep, or a sweep's job without a run."""

    path: Path
    state: str  # running, finished, interrupted, failed, refused, waiting, or broken
    unit: str = ""  # the unit of ``done`` and ``total``: frames, samples or, for a sweep, jobs
    domain: Domain = CONTROL
    done: int = 0
    total: int | None = None  # the value of ``done`` at the end; None if unknown
    score: float | None = None
    error: float | None = None  # standard error of ``score``; None if unknown
    best: float | None = None  # return of the best checkpoint in the closing evaluation
    best_error: float | None = None
    kl: float | None = None  # last row's eval/kl_ref, else kl/ref/exact, in nats
    kl_shown: str = ""  # the same; else kl/ref/k3, so marked
    started: str | None = None  # start time in ISO 8601; None before the start
    note: str = ""  # errors and warnings, in one line
    jobs: dict[str, int] = field(default_factory=dict)  # only for a sweep: state -> number of jobs


def entries(folder: Path) -> list[Entry]:
    """List the runs and sweeps below a folder, newest last; for a sweep's folder, list its jobs."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {what}; give a folder of runs, such as outputs")
    if (folder / SWEEP_FILE).is_file():
        return _jobs_of(folder)
    unsorted = [
        _run(path) if is_run else _sweep(path) for path, is_run in walk(folder, into_sweeps=False)
    ]
    return sorted(unsorted, key=lambda entry: (_seconds(entry), entry.path))


def _jobs_of(folder: Path) -> list[Entry]:
    """List the jobs of a sweep, and other runs in its folder."""
    try:
        planned = SweepFile.read(folder).jobs
    except ConfigError as error:
        return [Entry(folder, BROKEN, note=first_line(error)), *map(_run, _runs_in(folder))]
    listed = {run.path for run, _ in planned}
    unlisted = [path for path in _runs_in(folder) if path not in listed]
    return [*(_job(*each) for each in planned), *map(_run, unlisted)]


def _runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _seconds(entry: Entry) -> float:
    """Return the start time of an entry; if unknown, the time of the last write to its folder."""
    try:
        return datetime.fromisoformat(entry.started or "").timestamp()
    except (ValueError, OverflowError):
        return entry.path.stat().st_mtime if entry.path.exists() else 0.0


# --------------------------------------------------------------------------------------- sweeps


def _sweep(folder: Path) -> Entry:
    """Make a sweep's entry from its jobs' manifests: states in ``sweep.json`` may be outdated."""
    try:
        planned = SweepFile.read(folder).jobs
    except ConfigError as error:
        return Entry(folder, BROKEN, note=first_line(error))
    states: Counter[str] = Counter()
    starts = []
    for each in planned:
        state, manifest = _state(*each)
        states[state] += 1
        starts.append(str(manifest.get("started") or ""))
    known = [state for state in _STATES if states[state]]
    return Entry(
        folder,
        known[0] if known else (next(iter(states), "waiting")),
        unit="jobs",
        done=states["finished"],
        total=len(planned),
        started=min(filter(None, starts), default=None),
        jobs=dict(sorted(states.items())),
    )


def _state(run: RunFolder, job: JobEntry) -> tuple[str, dict[str, Any]]:
    """Return a job's state and its manifest; {} if the manifest is missing or unreadable."""
    if not run.exists:
        return ("waiting" if job.status == "running" else job.status), {}
    try:
        return run.status, run.manifest
    except UNREADABLE:
        return BROKEN, {}


def _job(run: RunFolder, job: JobEntry) -> Entry:
    """Make a job's entry from its run or, without a run, from ``sweep.json``."""
    if run.exists:
        return _run(run.path)
    return Entry(run.path, _state(run, job)[0], note=(job.error or "").partition("\n")[0])


# ----------------------------------------------------------------------------------------- runs


def _run(folder: Path) -> Entry:
    run = RunFolder(folder)
    try:
        manifest, state = run.manifest, run.status
        notes = [str(manifest.get("error") or "").partition("\n")[0]]
        left_out: list[str] = []
        row = last_values(run.metrics, left_out.append)
        notes += [f"{run.metrics.name}: bad rows near its end were skipped"] * bool(left_out)
        domain, frames = recorded_domain(manifest), read_settings(folder).get("frames")
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
            kl=row.get("eval/kl_ref", row.get("kl/ref/exact")),
            kl_shown=shown_kl(row, domain),
            started=manifest.get("started"),
            note="; ".join(filter(None, notes)),
        )
    except UNREADABLE as error:
        return Entry(folder, BROKEN, note=why_unreadable(error))


def last_values(path: Path, say: Callable[[str], None] = warn) -> Row:
    """Read the last row of a ``metrics.jsonl``; if it lacks returns, add those of earlier rows.

    A row has a return only after an evaluation, or if an episode ended in its rollout.
    :func:`klrl.runs.rows.each_row` parses the last rows, and calls ``say`` for bad ones. Earlier
    rows are only searched for returns. Without rows, the result is empty.
    """
    if not path.is_file() or not path.stat().st_size:
        return {}
    if path.stat().st_size > ROWS:
        raise OSError(f"{path.name} is larger than {ROWS:,} bytes")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        start = content.rfind(b"\n", 0, max(len(content) - _END, 0)) + 1
        rows = list(each_row(content[start:].split(b"\n"), path, say))
        found = {name: row for row in rows for name in _RETURNS if name in row}
        for name in _RETURNS:
            at = content.rfind(f'"{name}": '.encode(), 0, start)
            if name not in found and at >= 0:
                line = content[content.rfind(b"\n", 0, at) + 1 : content.find(b"\n", at)]
                found[name] = parse_row(line) or {}
    returns = [(key, row) for name, row in found.items() for key in (name, f"{name}_se")]
    last = rows[-1] if rows else {}
    return {**last, **{key: row[key] for key, row in returns if key in row}}


#: Matches the names of folders to skip: hidden folders, and the folders of checkpoints.
_NO_RUN = re.compile(r"\.|frames-\d+$")


def walk(root: Path, *, into_sweeps: bool) -> Iterator[tuple[Path, bool]]:
    """Yield each folder of a run (True) or sweep (False) at or below ``root``, in order of names.

    Does not search inside runs and, unless ``into_sweeps``, inside sweeps. Skips the folders of
    checkpoints: they contain a ``manifest.json``, but no run. Follows links, to each folder once.
    """
    seen: set[str] = set()
    for name, below, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(name)) in seen:  # a link back, or a second link
            below.clear()
            continue
        seen.add(real)
        is_run = "manifest.json" in files
        if is_run or SWEEP_FILE in files:
            yield Path(name), is_run
            if is_run or not into_sweeps:
                below.clear()
        below[:] = sorted(each for each in below if not _NO_RUN.match(each))
