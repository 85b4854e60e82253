"""The runs that are not among the statistics, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klrl.report.runs import Run
from klrl.report.settings import identity


@dataclass(frozen=True)
class Job:
    """A run that is not among the statistics.

    Attributes:
        run: the run.
        name: its setting.
        state: why it is not.
    """

    run: Run
    name: str
    state: str


def other_jobs(
    runs: Sequence[Run], counted: Sequence[Run], replaced: Sequence[Run], names: dict[str, str]
) -> list[Job]:
    """Runs outside the statistics, with the reason."""
    jobs = []
    for run in runs:
        name = names[identity(run)]
        if any(run is other for other in replaced):
            jobs.append(Job(run, name, "run again later"))
        elif not any(run is other for other in counted):
            empty = "" if run.rows or run.status != "finished" else ", without rows"
            jobs.append(Job(run, name, run.status + empty))
    return jobs
