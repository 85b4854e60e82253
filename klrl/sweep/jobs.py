"""One job of a sweep: its overrides, its identity, its status."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import refuse_link
from klrl.config import JobConfig
from klrl.config.identity import Identity, identity
from klrl.runs.folder import BrokenRun, RunFolder
from klrl.sweep.sweep_file import SweepFile


@dataclass(frozen=True)
class Job:
    """All that a process needs to run one job, on this machine or another."""

    name: str  # the folder's name
    folder: Path  # absolute
    overrides: tuple[str, ...]
    config: JobConfig
    group: str  # the sweep's name, for wandb
    cwd: Path  # base of relative paths in the settings
    host: str  # the machine on which its job checks passed
    note: str = ""  # why the folder's name ends with a hash; empty without a hash
    flags: tuple[str, ...] = ()  # of its own command, as ``--config-dir mine``
    queued: str | None = None  # its id in SLURM's queue, if it is already queued

    @property
    def identity(self) -> Identity:
        """A key that is equal for two jobs that compute the same rows."""
        return identity(self.config)

    @property
    def placed(self) -> bool:
        """True if a launcher may choose the job's CUDA device."""
        return self.config.device in ("auto", "cuda")

    @property
    def log(self) -> Path:
        """The file with the job's output, if it ran in a separate process."""
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    The status is finished, interrupted, failed, refused (nothing was recorded), waiting (not
    started), or running elsewhere (in another process).
    """

    name: str
    status: str
    error: str | None = None  # in one line
    signum: int | None = None  # the signal that interrupted it
    seconds: float | None = None  # wall time, if known


@dataclass(frozen=True)
class Notice:
    """An event of a launcher: a line to print for the user."""

    line: str


@dataclass(frozen=True)
class Queued:
    """An event of a launcher: jobs were sent to SLURM. ``ids``: job name -> id in the queue."""

    ids: Mapping[str, str]


#: States of jobs when a sweep starts, as the sweep prints them.
FINISHED, ELSEWHERE, QUEUED, BEGUN, NEW = (
    *("finished before", "running in another process", "in the queue already"),
    *("to resume", "to start"),
)
#: The sweep runs the jobs in these states, in this order.
OPEN = (QUEUED, BEGUN, NEW)


def recorded_identity(run: RunFolder) -> Identity:
    """Read the identity of a run's job from its manifest."""
    manifest = run.manifest
    return Identity(str(manifest.get("config_hash")), int(manifest.get("numerics", 0)))


def recorded(folder: Path) -> dict[Identity, Path]:
    """Map the identity of each run in a sweep's folder to the run's folder.

    Raises:
        ConfigError: a manifest cannot be read.
    """
    folders: dict[Identity, Path] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        try:
            folders[recorded_identity(RunFolder(path.parent))] = path.parent
        except BrokenRun as error:
            raise ConfigError(f"{path.parent}: {error}; move that folder away") from error
    return folders


def by_status(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Group the jobs by state, according to their manifests and :attr:`Job.queued`."""
    result: dict[str, list[Job]] = {each: [] for each in (FINISHED, ELSEWHERE, *OPEN)}
    known = {"finished": FINISHED, "running": ELSEWHERE, "": NEW}
    for job in jobs:
        run = RunFolder(job.folder)
        status = known.get(run.status if run.exists else "", BEGUN)
        result[QUEUED if job.queued and status != FINISHED else status].append(job)
    return result


def counted(status: Mapping[str, Sequence[Job]]) -> str:
    """Format the number of jobs in all and in each state: ``2 jobs, 2 to start``."""
    total = sum(map(len, status.values()))
    parts = [f"{len(group)} {name}" for name, group in status.items() if group]
    return ", ".join([f"{total} job{'s' * (total != 1)}", *parts])


def make_jobs(
    folder: Path, named: Sequence[tuple[str, Sequence[str], JobConfig]], flags: Sequence[str] = ()
) -> list[Job]:
    """Make the jobs of a sweep, and choose their folders.

    A job that began, or is in ``sweep.json``, keeps its folder. Any other job gets a new folder
    with the job's name; if a different job has that folder, the name ends with the settings' hash.
    ``named``: name, overrides and checked settings of each job; duplicates are dropped. ``flags``:
    the flags of the sweep's command that each job's own command needs.
    """
    known = recorded(folder)
    taken = {path: key for key, path in known.items()}
    for entry in SweepFile.read(folder).entries:  # includes queued jobs that have not begun
        path = folder / entry.name
        if path not in taken and entry.key not in known:
            known[entry.key], taken[path] = path, entry.key
    jobs: dict[Identity, Job] = {}
    for name, overrides, config in named:
        key = identity(config)
        if key in jobs:
            continue
        path, note = known.get(key, folder / name), ""
        refuse_link(path)
        if taken.get(path, key) != key:
            path, note = _own_folder(path, key, taken)
        taken[path] = key
        jobs[key] = Job(
            name=path.name,
            folder=path.resolve(),
            overrides=tuple(overrides),
            flags=tuple(flags),
            config=config,
            group=folder.name,
            cwd=Path.cwd(),
            host=platform.node(),
            note=note,
        )
    return list(jobs.values())


def _own_folder(path: Path, key: Identity, taken: Mapping[Path, Identity]) -> tuple[Path, str]:
    """Return a new folder for a job, since another job has ``path``; and a line for the user."""
    run = RunFolder(path)
    if taken[path].settings == key.settings:
        version = f"klrl {run.manifest.get('klrl')}" if run.exists else "another klrl"
        raise ConfigError(
            f"{path}: has this job as run by {version}; this version computes different numbers "
            f"(numerics {taken[path].numerics}, now {key.numerics}); give another sweep=NAME, or "
            "move that folder away"
        )
    own = path.with_name(f"{path.name}-{key.settings}")
    return own, f"{path} has a job with other settings; this job goes into {own.name}"
