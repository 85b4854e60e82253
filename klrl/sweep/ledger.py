"""What a sweep prints and records: ``sweep.json``, a line per job, the closing table."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from klrl.base.text import text_table
from klrl.domains import CONTROL, Domain, domain_of
from klrl.runs.folder import run_id
from klrl.runs.metrics import METRICS, Row, metric_of
from klrl.runs.progress import duration
from klrl.runs.returns import final_return, last_recorded
from klrl.runs.rows import read_rows
from klrl.sweep.jobs import Job, Outcome
from klrl.sweep.sweep_file import Entry, SweepFile


class Ledger:
    """The jobs of a sweep with their status.

    Args:
        folder: the sweep's.
        argv: its command line, behind ``klrl``.
        jobs: all of them; more may be added.

    Attributes:
        before: what ``sweep.json`` held already, and keeps.
        notes: a line for each job whose folder holds another run than ``sweep.json`` had.

    Raises:
        ConfigError: ``sweep.json`` cannot be read.
    """

    def __init__(self, folder: Path, argv: Sequence[str], jobs: Sequence[Job]) -> None:
        self._folder = folder
        self.before = SweepFile.read(folder)
        self._command = shlex.join(["python", "-m", "klrl", *argv])
        self.jobs = {job.name: job for job in jobs}
        self._status: dict[str, tuple[str, str | None]] = defaultdict(lambda: ("waiting", None))
        self._seconds: dict[str, float] = {}
        self._queue: dict[str, str | None] = {e.name: e.queue for e in self.before.entries}
        self._runs: dict[str, str | None] = {e.name: e.run for e in self.before.entries}
        self.notes: list[str] = []

    def add(self, jobs: Sequence[Job]) -> None:
        """Add jobs, as a search makes them."""
        self.jobs |= {job.name: job for job in jobs}

    def set(self, job: Job, status: str) -> None:
        """Store a job's status before anything runs."""
        self._status[job.name] = status, None
        now, before = run_id(job.folder), self._runs.get(job.name)
        if now is not None and before not in (None, now):
            self.notes.append(
                f"{job.folder}: holds run {now[:8]}, and sweep.json has run {before[:8]} as "
                f"{job.name}; {now[:8]} counts from now on"
            )
        self._runs[job.name] = now or before

    def take(self, outcome: Outcome) -> None:
        """Store how a job ended."""
        self._status[outcome.name] = outcome.status, outcome.error
        if outcome.seconds is not None:
            self._seconds[outcome.name] = outcome.seconds
        self._runs[outcome.name] = run_id(self.jobs[outcome.name].folder)

    def queued(self, ids: Mapping[str, str]) -> None:
        """Store the ids of jobs, by name, in SLURM's queue."""
        self._queue |= ids

    def status(self, name: str) -> str:
        """The status of a job; waiting where none is stored."""
        return self._status[name][0]

    def write(self) -> None:
        """Replace ``sweep.json`` in one step."""
        entries = [
            Entry(
                name=job.name,
                folder=job.folder.name,
                overrides=list(job.overrides),
                identity=job.identity.settings,
                numerics=job.identity.numerics,
                status=self._status[job.name][0],
                error=self._status[job.name][1],
                queue=self._queue.get(job.name),
                run=self._runs.get(job.name),
            )
            for job in self.jobs.values()
        ]
        self.before.write(self._folder, self._command, entries)

    def table(self) -> str:
        """One line per job, those that did not finish last."""
        domains: dict[Domain, None] = {}
        rows = []
        for name, job in self.jobs.items():
            # One job's rows at a time: a sweep may have a thousand jobs.
            recorded = _recorded(job)
            if recorded:
                domains[recorded[1]] = None
            status, error = self._status[name]
            rows.append(_line(job, status, error, self._seconds.get(name), recorded))
        rows.sort(key=lambda row: row[1] != "finished")
        heads = _heads(list(domains) or [CONTROL])
        return text_table([heads, *rows], right=(2, 3, 4, 5), indent=2)

    def counts(self) -> str:
        """How many jobs have which status, as in ``12 jobs: 11 finished, 1 failed``."""
        states = [self.status(name) for name in self.jobs]
        parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))]
        return f"{len(states)} job{'s' * (len(states) != 1)}: {', '.join(parts)}"


#: The KL column of the table.
_KL = "kl/ref/exact"
#: A job's rows and its domain.
Recorded = tuple[list[Row], Domain]


def _recorded(job: Job) -> Recorded | None:
    """What a job recorded; None where it recorded nothing."""
    path = job.folder / "metrics.jsonl"
    rows = read_rows(path) if path.exists() else []
    if not rows:
        return None
    return rows, domain_of(job.config)


def _heads(domains: Sequence[Domain]) -> tuple[str, ...]:
    """The column heads; ``frames/samples`` where jobs of both domains have rows."""
    axis = "/".join(domain.axis for domain in domains)
    score = "/".join(domain.score for domain in domains)
    return "job", "state", axis, "time", score, METRICS[_KL].short, ""


def _line(
    job: Job, status: str, error: str | None, seconds: float | None, recorded: Recorded | None
) -> tuple[str, ...]:
    frames, score, kl = "", "", ""
    took = "" if seconds is None or status == "waiting" else duration(seconds)
    if status != "refused" and recorded:
        rows, domain = recorded
        frames = _shown(rows[-1].get(domain.axis), domain.axis, domain)
        score = _shown(final_return(last_recorded(rows)), "eval/return", domain)
        kl = _shown(rows[-1].get(_KL), _KL, domain)
        # An evaluation before the first iteration has a row of its own, without one.
        took = took or duration(sum(row.get("time/iteration", 0.0) for row in rows))
    return job.name, status, frames, took, score, kl, error or ""


def _shown(value: float | None, name: str, domain: Domain) -> str:
    return "" if value is None else metric_of(name, domain).show(value)


def ended_line(outcome: Outcome, job: Job, done: int, total: int) -> str:
    """The line that is printed when a job beside others ends."""
    line = f"[{done}/{total}] {job.name}: {outcome.status}"
    if outcome.error:
        return f"{line}: {outcome.error}"
    recorded = _recorded(job)
    if recorded:
        rows, domain = recorded
        score = final_return(last_recorded(rows))
        line += f", {domain.score} {_shown(score, 'eval/return', domain)}" * (score is not None)
    return line if outcome.seconds is None else f"{line}, {duration(outcome.seconds)}"
