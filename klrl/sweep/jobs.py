"""One job of a sweep: its overrides, its identity, its status."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError
from klrl.config import JobConfig
from klrl.config.identity import Identity, identity, settings_hash
from klrl.runs.folder import BrokenRun, RunFolder, by_dotted_key
from klrl.runs.resume import stored_config


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
    """

    name: str
    folder: Path
    overrides: tuple[str, ...]
    config: JobConfig
    group: str
    cwd: Path
    host: str

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
        seconds: its wall time.
    """

    name: str
    status: str
    error: str | None = None
    signum: int | None = None
    seconds: float = 0.0


@dataclass
class JobStatus:
    """The jobs of a sweep by status; ``elsewhere``: running in another process."""

    finished: list[Job] = field(default_factory=list)
    elsewhere: list[Job] = field(default_factory=list)
    begun: list[Job] = field(default_factory=list)
    new: list[Job] = field(default_factory=list)

    @property
    def open(self) -> list[Job]:
        """The jobs to run now, those that were begun first."""
        return [*self.begun, *self.new]


def recorded_identity(run: RunFolder) -> Identity:
    """The identity of a run that was begun.

    0.1.0 stored a hash over its own spelling of the settings, so its settings are read back and
    hashed again. If they cannot be read, the identity is that of no job.
    """
    manifest = run.manifest
    if "numerics" in manifest:
        return Identity(str(manifest.get("config_hash")), int(manifest["numerics"]))
    try:
        return Identity(settings_hash(stored_config(run.path)), 1)
    except (ConfigError, OSError):
        return Identity(str(manifest.get("config_hash")), 0)


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
        if not run.exists:
            result.new.append(job)
        elif (status := run.status) == "finished":
            result.finished.append(job)
        elif status == "running":
            result.elsewhere.append(job)
        else:
            result.begun.append(job)
    return result


def make_jobs(folder: Path, named: Sequence[tuple[str, Sequence[str], JobConfig]]) -> list[Job]:
    """Give each job its folder: the one that already holds its identity, else one of its name.

    Args:
        folder: the sweep's.
        named: name, overrides and checked settings of each job; a repeated job counts once.

    Raises:
        ConfigError: the folder of a job's name holds a job with other settings.
    """
    known = recorded(folder)
    taken = {path: key for key, path in known.items()}
    jobs: dict[Identity, Job] = {}
    for name, overrides, config in named:
        key = identity(config)
        if key in jobs:
            continue
        path = known.get(key, folder / name)
        if taken.setdefault(path, key) != key:
            raise ConfigError(f"{path}: {_conflict(path, key, config)}")
        jobs[key] = Job(
            name=path.name,
            folder=path.resolve(),
            overrides=tuple(overrides),
            config=config,
            group=folder.name,
            cwd=Path.cwd(),
            host=platform.node(),
        )
    return list(jobs.values())


def _conflict(path: Path, requested: Identity, config: JobConfig) -> str:
    """How the job in a folder differs from the one of the same name that is requested."""
    run = RunFolder(path)
    if not run.exists:
        return "two jobs of this sweep would share it; run one of them in another sweep=NAME"
    stored = recorded_identity(run)
    if stored.settings == requested.settings:
        return (
            f"holds this job as klrl {run.manifest.get('klrl')} ran it, and this version computes "
            f"other numbers (numerics {stored.numerics}, now {requested.numerics}); give another "
            "sweep=NAME, or move that folder away"
        )
    try:
        changed = ", ".join(_differences(path, config)) or "other settings"
    except ConfigError:
        changed = "other settings, which cannot be read"
    return f"holds a job with {changed}; give another sweep=NAME, or move that folder away"


def _differences(path: Path, config: JobConfig) -> list[str]:
    both = stored_config(path), config
    stored, new = map(flat_settings, both)
    ignored = ("logger", *([] if any(each.eval.on for each in both) else ["eval."]))
    keys = [k for k in new | stored if new.get(k) != stored.get(k) and not k.startswith(ignored)]
    return [f"{key}={stored.get(key)} (not {new.get(key)})" for key in sorted(keys)[:3]]


def flat_settings(config: JobConfig) -> dict[str, Any]:
    """Settings by dotted key, with values as in JSON."""
    return by_dotted_key(json.loads(json.dumps(dataclasses.asdict(config))))
