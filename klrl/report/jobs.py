"""The jobs that the reader must know of beside the statistics: failed, waiting, run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from klrl.report.runs import Found, Run
from klrl.report.settings import identity
from klrl.report.sweeps import Planned

#: What went wrong comes first, what merely waits last.
_ORDER = ("failed", "refused", "interrupted", "running", "waiting")


@dataclass(frozen=True)
class Job:
    """A job that did not finish, or is not among the statistics.

    Attributes:
        folder: its run folder.
        state: how it stands.
        setting: what was asked for.
        seed: its seed; empty where only the sweep tells of it, without one.
        iterations: how many were recorded; empty where it never started.
        error: what went wrong, as it was recorded.
        counted: whether it is among the statistics all the same.
    """

    folder: str
    state: str
    setting: str
    seed: str
    iterations: str
    error: str
    counted: bool = False


def other_jobs(
    found: Found, counted: Sequence[Run], replaced: Sequence[Run], names: Mapping[str, str]
) -> list[Job]:
    """Everything but the finished runs that count, by state.

    Args:
        found: all runs and sweeps.
        counted: the runs that may count.
        replaced: those among them that a later run of the same job replaced.
        names: what :func:`~klrl.report.settings.names_of` says of all runs.
    """
    planned = [job for sweep in found.sweeps for job in sweep.jobs]
    told = {job.folder.resolve(): job.error for job in planned}
    among, again = {id(run) for run in counted}, {id(run) for run in replaced}
    several = len({run.task for run in found.runs}) > 1
    jobs = []
    for run in found.runs:
        counts = id(run) in among and id(run) not in again
        if not counts or run.status != "finished":
            error = str(run.manifest.get("error") or told.get(run.path.resolve(), ""))
            state = "run again later" if id(run) in again else _state(run)
            name = f"{run.task}: " * several + names[identity(run)]
            jobs.append(_job(run, state, name, error, counts))
    jobs += [_never_begun(job) for job in planned if not job.begun]
    return sorted(jobs, key=_rank)


def _state(run: Run) -> str:
    return run.status if run.rows or run.status != "finished" else "finished, without rows"


def _job(run: Run, state: str, name: str, error: str, counts: bool) -> Job:
    return Job(str(run.path), state, name, str(run.seed), str(run.rows), error, counts)


def _never_begun(job: Planned) -> Job:
    """What the sweep tells of a job whose folder holds no run."""
    seed = next((override[5:] for override in job.overrides if override.startswith("seed=")), "")
    overrides = " ".join(override for override in job.overrides if not override.startswith("seed="))
    gone = "" if job.status in ("failed", "refused", "waiting") else ", but there is no run folder"
    return Job(str(job.folder), job.status + gone, overrides, seed, "", job.error)


def _rank(job: Job) -> int:
    places = [i for i, state in enumerate(_ORDER) if job.state.startswith(state)]
    return places[0] if places else len(_ORDER)


def count_states(jobs: Iterable[Job]) -> str:
    """As ``2 failed, 1 waiting``."""
    counts = Counter(job.state for job in jobs)
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def count(number: int, what: str) -> str:
    """As ``1 run`` or ``2 runs``."""
    return f"{number} {what}{'s' * (number != 1)}"
