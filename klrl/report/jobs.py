"""The jobs that are not in the statistics: failed, waiting, run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from klrl.report.runs import Inventory, Run
from klrl.report.settings import identity
from klrl.report.sweeps import Planned

#: Failed jobs come first, waiting ones last.
_ORDER = ("failed", "refused", "interrupted", "running", "waiting")


@dataclass(frozen=True)
class Job:
    """A job that did not finish, or is not in the statistics.

    Attributes:
        folder: its run folder.
        state: its status, or why it is not counted.
        setting: the setting's name, or the overrides of a job that never started.
        seed: its seed; empty if it never started and its overrides have none.
        iterations: how many were recorded; empty if it never started.
        error: the recorded error.
        counted: whether it is in the statistics all the same.
    """

    folder: str
    state: str
    setting: str
    seed: str
    iterations: str
    error: str
    counted: bool = False


def other_jobs(
    inventory: Inventory, counted: Sequence[Run], replaced: Sequence[Run], names: Mapping[str, str]
) -> list[Job]:
    """All jobs but the finished runs that are counted, by state.

    Args:
        inventory: all runs and sweeps.
        counted: the runs that may be counted.
        replaced: those that a later run of the same job replaced.
        names: from :func:`~klrl.report.settings.names_of`, for all runs.
    """
    planned = [job for sweep in inventory.sweeps for job in sweep.jobs]
    errors = {job.folder.resolve(): job.error for job in planned}
    among, again = {id(run) for run in counted}, {id(run) for run in replaced}
    several = len({run.task for run in inventory.runs}) > 1
    jobs = []
    for run in inventory.runs:
        counts = id(run) in among and id(run) not in again
        if not counts or run.status != "finished":
            error = str(run.manifest.get("error") or errors.get(run.path.resolve(), ""))
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
    """A job whose folder holds no run, from the sweep's record."""
    seed = next((each[5:] for each in job.overrides if each.startswith("seed=")), "")
    overrides = " ".join(each for each in job.overrides if not each.startswith("seed="))
    gone = "" if job.status in ("failed", "refused", "waiting") else ", but there is no run folder"
    return Job(str(job.folder), job.status + gone, overrides, seed, "", job.error)


def _rank(job: Job) -> int:
    ranks = [i for i, state in enumerate(_ORDER) if job.state.startswith(state)]
    return ranks[0] if ranks else len(_ORDER)


def count_states(jobs: Iterable[Job]) -> str:
    """As ``2 failed, 1 waiting``."""
    counts = Counter(job.state for job in jobs)
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def count(number: int, what: str) -> str:
    """As ``1 run`` or ``2 runs``."""
    return f"{number} {what}{'s' * (number != 1)}"
