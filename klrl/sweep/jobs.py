"""One job of a sweep: its overrides, its identity, its status."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError
from klrl.base.files import refuse_link
from klrl.config import JobConfig
from klrl.config.identity import Identity, identity
from klrl.config.overrides import job_name
from klrl.runs.folder import BrokenRun, RunFolder, by_dotted_key
from klrl.runs.resume import stored_config
from klrl.sweep.sweep_file import SweepFile


@dataclass(frozen=True)
class Job:
    """All that a process, on this machine or another, needs to run one job.

    Attributes:
        name: its folder's name.
        folder: absolute.
        overrides: as on the command line.
        config: its settings, checked.
        group: the sweep's name, for wandb.
        cwd: the folder that relative paths among the settings start from.
        host: the machine whose preflight check the job has passed.
        note: why its folder is not called by its name; empty where it is.
        queued: the id of its copy that is in SLURM's queue already; None without one.
    """

    name: str
    folder: Path
    overrides: tuple[str, ...]
    config: JobConfig
    group: str
    cwd: Path
    host: str
    note: str = ""
    queued: str | None = None

    @property
    def identity(self) -> Identity:
        """Equal for two jobs that compute the same thing."""
        return identity(self.config)

    @property
    def log(self) -> Path:
        """What the job printed, where it ran beside others."""
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        name: the job's.
        status: finished, interrupted, failed, refused (before anything was recorded), or waiting
            (not started).
        error: what failed, in one line.
        signum: the signal that interrupted it.
        seconds: its wall time; None: not known.
    """

    name: str
    status: str
    error: str | None = None
    signum: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Notice:
    """A line for the user while jobs run."""

    line: str


@dataclass(frozen=True)
class Queued:
    """Jobs were sent into SLURM's queue: name -> id there."""

    ids: Mapping[str, str]


@dataclass
class JobStatus:
    """The jobs of a sweep by status.

    ``elsewhere``: running in another process; ``queued``: in SLURM's queue already.
    """

    finished: list[Job] = field(default_factory=list)
    elsewhere: list[Job] = field(default_factory=list)
    begun: list[Job] = field(default_factory=list)
    new: list[Job] = field(default_factory=list)
    queued: list[Job] = field(default_factory=list)

    @property
    def open(self) -> list[Job]:
        """The jobs to run now, those that were begun first."""
        return [*self.queued, *self.begun, *self.new]


def recorded_identity(run: RunFolder) -> Identity:
    """The identity of a run that was begun."""
    manifest = run.manifest
    return Identity(str(manifest.get("config_hash")), int(manifest.get("numerics", 0)))


def recorded(folder: Path) -> dict[Identity, Path]:
    """The runs in a sweep's folder, by identity.

    Raises:
        ConfigError: a manifest that cannot be read.
    """
    folders: dict[Identity, Path] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        try:
            folders[recorded_identity(RunFolder(path.parent))] = path.parent
        except BrokenRun as error:
            raise ConfigError(f"{path.parent}: {error}; move that folder away") from error
    return folders


def status_of(jobs: Iterable[Job]) -> JobStatus:
    """The status of jobs, from their folders' manifests."""
    result = JobStatus()
    for job in jobs:
        run = RunFolder(job.folder)
        status = run.status if run.exists else None
        if status == "finished":
            result.finished.append(job)
        elif job.queued:
            result.queued.append(job)
        elif status is None:
            result.new.append(job)
        elif status == "running":
            result.elsewhere.append(job)
        else:
            result.begun.append(job)
    return result


def make_jobs(folder: Path, named: Sequence[tuple[str, Sequence[str], JobConfig]]) -> list[Job]:
    """Give each job its folder: the one that holds its identity, or is to, else one of its name.

    Where another job has that name, the folder's name says in what they differ.

    Args:
        folder: the sweep's.
        named: name, overrides and checked settings of each job; a repeated job counts once.

    Raises:
        ConfigError: the folder of a job's name holds the job with other numerics, or the sweep's
            files cannot be read.
    """
    known = recorded(folder)
    taken = {path: key for key, path in known.items()}
    for entry in SweepFile.read(folder).entries:  # jobs that have not begun, and may be in a queue
        path = folder / entry.folder
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
            path, note = _own_folder(path, key, config, taken)
        taken[path] = key
        jobs[key] = Job(
            name=path.name,
            folder=path.resolve(),
            overrides=tuple(overrides),
            config=config,
            group=folder.name,
            cwd=Path.cwd(),
            host=platform.node(),
            note=note,
        )
    return list(jobs.values())


def _own_folder(
    path: Path, key: Identity, config: JobConfig, taken: Mapping[Path, Identity]
) -> tuple[Path, str]:
    """A folder for a job whose name is another's, and a line that says so.

    Raises:
        ConfigError: the other one has the same settings, and other numerics.
    """
    run = RunFolder(path)
    if taken[path].settings == key.settings:
        version = f"klrl {run.manifest.get('klrl')}" if run.exists else "another klrl"
        raise ConfigError(
            f"{path}: holds this job as {version} ran it, and this version computes other numbers "
            f"(numerics {taken[path].numerics}, now {key.numerics}); give another sweep=NAME, or "
            "move that folder away"
        )
    other = "other settings"
    try:
        changed = _differences(path, config) if run.exists else {}
    except ConfigError:
        changed, other = {}, "other settings, which cannot be read"
    both = [f"{name}={old} (not {new})" for name, (old, new) in changed.items()]
    new = [f"{name}={new}" for name, (_, new) in changed.items()]
    own = path.with_name(job_name([path.name, *new], [path.name.partition("=")[0], *changed]))
    if not changed or own in taken or own.exists():
        own = path.with_name(f"{path.name}-{key.settings}")
    other = ", ".join(both) or other
    return own, f"{path} holds a job with {other}; this one is another, in {own.name}"


def _differences(path: Path, config: JobConfig) -> dict[str, tuple[Any, Any]]:
    """Up to three settings in which the job in a folder and another differ: key -> both values."""
    both = stored_config(path), config
    stored, new = map(flat_settings, both)
    ignored = ("logger", *([] if any(each.eval.on for each in both) else ["eval."]))
    keys = [k for k in new | stored if new.get(k) != stored.get(k) and not k.startswith(ignored)]
    return {key: (stored.get(key), new.get(key)) for key in sorted(keys)[:3]}


def flat_settings(config: JobConfig) -> dict[str, Any]:
    """Settings by dotted key, with values as in JSON."""
    return by_dotted_key(json.loads(json.dumps(dataclasses.asdict(config))))
