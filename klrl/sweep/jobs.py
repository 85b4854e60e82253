"""One job of a sweep: its words, its identity, how it stands."""

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
    """Everything that a process, here or elsewhere, needs to run one job.

    Attributes:
        name: of its folder.
        folder: absolute.
        words: as on the command line.
        config: its settings, checked.
        group: the sweep, for wandb.
        cwd: where relative paths among the settings start.
        host: where they were checked against the machine.
    """

    name: str
    folder: Path
    words: tuple[str, ...]
    config: JobConfig
    group: str
    cwd: Path
    host: str

    @property
    def identity(self) -> Identity:
        """Two jobs that share it compute the same thing."""
        return identity(self.config)

    @property
    def log(self) -> Path:
        """What the job said, where it ran beside others."""
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        name: the job's.
        status: finished, interrupted, failed, refused (before anything was recorded), or waiting
            (it was not begun).
        error: what failed, in a line.
        signum: what interrupted it.
        seconds: it took.
    """

    name: str
    status: str
    error: str | None = None
    signum: int | None = None
    seconds: float = 0.0


@dataclass
class Standing:
    """The jobs of a sweep by how they stand."""

    finished: list[Job] = field(default_factory=list)
    elsewhere: list[Job] = field(default_factory=list)
    begun: list[Job] = field(default_factory=list)
    new: list[Job] = field(default_factory=list)

    @property
    def open(self) -> list[Job]:
        """To be run now: what was begun goes first."""
        return [*self.begun, *self.new]


def recorded_identity(run: RunFolder) -> Identity:
    """The same of a run that was begun.

    0.1.0 noted a hash over its own spelling of the settings; here they are read back. Where they
    cannot be, the identity is that of no job.
    """
    manifest = run.manifest
    if "numerics" in manifest:
        return Identity(str(manifest.get("config_hash")), int(manifest["numerics"]))
    try:
        return Identity(settings_hash(stored_config(run.path)), 1)
    except (ConfigError, OSError):
        return Identity(str(manifest.get("config_hash")), 0)


def recorded(folder: Path) -> dict[Identity, Path]:
    """The runs in a sweep's folder, by what they compute.

    Raises:
        ConfigError: a manifest that cannot be read.
    """
    found: dict[Identity, Path] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        try:
            found[recorded_identity(RunFolder(path.parent))] = path.parent
        except BrokenRun as error:
            raise ConfigError(f"{path.parent}: {error}; move that folder away") from error
    return found


def stand(jobs: Iterable[Job]) -> Standing:
    """How jobs stand, by their folders' manifests."""
    standing = Standing()
    for job in jobs:
        run = RunFolder(job.folder)
        if not run.exists:
            standing.new.append(job)
        elif (status := run.status) == "finished":
            standing.finished.append(job)
        elif status == "running":
            standing.elsewhere.append(job)
        else:
            standing.begun.append(job)
    return standing


def make_jobs(folder: Path, named: Sequence[tuple[str, Sequence[str], JobConfig]]) -> list[Job]:
    """Give each job its folder: the one that holds its identity already, else one of its name.

    Args:
        folder: the sweep's.
        named: name, words and checked settings of each job; a repeated job counts once.

    Raises:
        ConfigError: a folder of a job's name holds a job with other settings.
    """
    known = recorded(folder)
    taken = {path: key for key, path in known.items()}
    jobs: dict[Identity, Job] = {}
    for name, words, config in named:
        mine = identity(config)
        if mine in jobs:
            continue
        path = known.get(mine, folder / name)
        if taken.setdefault(path, mine) != mine:
            raise ConfigError(f"{path}: {_why_other(path, mine, config)}")
        jobs[mine] = Job(
            name=path.name,
            folder=path.resolve(),
            words=tuple(words),
            config=config,
            group=folder.name,
            cwd=Path.cwd(),
            host=platform.node(),
        )
    return list(jobs.values())


def _why_other(path: Path, mine: Identity, config: JobConfig) -> str:
    """Why the job in a folder of the same name is another one."""
    run = RunFolder(path)
    if not run.exists:
        return "two jobs of this sweep would share it; give another value a name of its own"
    theirs = recorded_identity(run)
    if theirs.settings == mine.settings:
        return (
            f"holds this job of klrl {run.manifest.get('klrl')}, whose numbers are no longer this "
            f"version's ({theirs.numerics}, now {mine.numerics}); give another sweep=NAME, or move "
            "that folder away"
        )
    try:
        changed = ", ".join(_differences(path, config)) or "other settings"
    except ConfigError:
        changed = "other settings, which cannot be read"
    return f"holds a job with {changed}; give another sweep=NAME, or move that folder away"


def _differences(path: Path, config: JobConfig) -> list[str]:
    theirs, ours = (flat_settings(c) for c in (stored_config(path), config))
    keys = [k for k in ours | theirs if ours.get(k) != theirs.get(k) and not k.startswith("logger")]
    return [f"{key}={theirs.get(key)} (not {ours.get(key)})" for key in sorted(keys)[:3]]


def flat_settings(config: JobConfig) -> dict[str, Any]:
    """Settings by their dotted keys, as JSON has them."""
    return by_dotted_key(json.loads(json.dumps(dataclasses.asdict(config))))
