"""Records a sweep in ``sweep.json``; prints a line per job and the closing table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from klrl.base.screen import show_table
from klrl.base.text import counted
from klrl.domains import Domain, domain_of
from klrl.runs.folder import run_id
from klrl.runs.metrics import METRICS, metric_of
from klrl.runs.progress import duration
from klrl.runs.returns import final_return, last_recorded, shown_kl
from klrl.runs.rows import rows_so_far
from klrl.sweep.jobs import Job, Outcome
from klrl.sweep.sweep_file import JobEntry, SweepFile


class Ledger:
    """The jobs of a sweep and their status. ``argv``: the sweep's arguments after ``klrl``."""

    def __init__(self, folder: Path, argv: Sequence[str]) -> None:
        self._folder = folder
        self.before = SweepFile.read(folder)  # the contents of ``sweep.json`` before this start
        self._command = shlex.join(["python", "-m", "klrl", *argv])
        self.jobs: dict[str, Job] = {}
        self._entries: dict[str, JobEntry] = {}
        self._seconds: dict[str, float] = {}
        #: A line for each job whose folder contains a different run than ``sweep.json`` records.
        self.notes: list[str] = []

    def set(self, job: Job, status: str) -> None:
        """Add a job, with the status that it has before the sweep runs jobs."""
        queue, before = next(
            ((e.queue, e.run) for e in self.before.entries if e.name == job.name), (None, None)
        )
        now = run_id(job.folder)
        if now is not None and before not in (None, now):
            self.notes.append(
                f"{job.folder}: has run {now[:8]}, but sweep.json has run {before[:8]} as "
                f"{job.name}; {now[:8]} counts from now on"
            )
        told = (job.name, list(job.overrides), *job.identity)
        self.jobs[job.name] = job
        self._entries[job.name] = JobEntry(*told, status, queue=queue, run=now or before)

    def take(self, outcome: Outcome) -> None:
        """Store how a job ended, also in ``sweep.json``."""
        if outcome.seconds is not None:
            self._seconds[outcome.name] = outcome.seconds
        run = run_id(self.jobs[outcome.name].folder)
        self._store(outcome.name, status=outcome.status, error=outcome.error, run=run)
        self.write()

    def queued(self, ids: Mapping[str, str]) -> None:
        """Store the jobs' ids in SLURM's queue in ``sweep.json``: a restarted sweep needs them."""
        for name, queue in ids.items():
            self._store(name, queue=queue)
        self.write()

    def _store(self, name: str, **told: str | None) -> None:
        self._entries[name] = replace(self._entries[name], **told)  # type: ignore[arg-type]

    def status(self, name: str) -> str:
        """Return the status of a job."""
        return self._entries[name].status

    def write(self) -> None:
        """Replace ``sweep.json`` in one step."""
        self.before.write(self._command, list(self._entries.values()))

    def show_table(self) -> None:
        """Print one line per job; finished jobs come first."""
        domains = [domain_of(job.config) for job in self.jobs.values()]
        # The column is named ``frames/samples`` if the sweep has jobs of both domains.
        axis = "/".join(dict.fromkeys(domain.axis for domain in domains))
        score = "/".join(dict.fromkeys(domain.score for domain in domains))
        heads = ("job", "state", axis, "time", score, METRICS["kl/ref/exact"].short, "")
        # Read the rows of one job at a time: a sweep may have a thousand jobs.
        rows = sorted(map(self._line, self.jobs.values()), key=lambda row: row[1] != "finished")
        show_table([heads, *rows], right=(2, 3, 4, 5), indent=2)

    def _line(self, job: Job) -> tuple[str, ...]:
        status, error = self._entries[job.name].status, self._entries[job.name].error
        seconds = None if status == "waiting" else self._seconds.get(job.name)
        frames = score = kl = ""
        if status != "refused" and (rows := rows_so_far(job.folder)):
            domain = domain_of(job.config)
            frames = _shown(rows[-1].get(domain.axis), domain.axis, domain)
            score = _shown(final_return(last_recorded(rows)), "eval/return", domain)
            kl = shown_kl(rows[-1], domain)
            # The row of an evaluation before the first iteration has no ``time/iteration``.
            timed = sum(row.get("time/iteration", 0.0) for row in rows)
            seconds = timed if seconds is None else seconds
        took = "" if seconds is None else duration(seconds)
        return job.name, status, frames, took, score, kl, error or ""

    def print_table(self, head: str = "") -> None:
        """Print the table and the number of jobs per status: ``2 jobs: 1 failed, 1 finished``."""
        self.show_table()
        states = sorted(self.status(name) for name in self.jobs)
        parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
        jobs = counted(len(states), "job")
        print(f"{head}{jobs}: {', '.join(parts)}; sweep folder: {self._folder}", flush=True)


def _shown(value: float | None, name: str, domain: Domain) -> str:
    return "" if value is None else metric_of(name, domain).show(value)


def ended_line(outcome: Outcome, job: Job, done: int, total: int) -> str:
    """Format the line that the sweep prints when a job in another process ends."""
    head = f"[{done}/{total}] {job.name}: {outcome.status}"
    if outcome.error:
        return f"{head}: {outcome.error}"
    domain, score = domain_of(job.config), final_return(last_recorded(rows_so_far(job.folder)))
    scored = "" if score is None else f", {domain.score} {_shown(score, 'eval/return', domain)}"
    return head + scored + ("" if outcome.seconds is None else f", {duration(outcome.seconds)}")
