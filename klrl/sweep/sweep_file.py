"""Reads and writes ``sweep.json``: the commands that ran in a sweep's folder, and their jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from klrl import __version__
from klrl.base.errors import ConfigError, in_one_line
from klrl.base.files import read_plain, replace_file
from klrl.config.identity import Identity
from klrl.runs.folder import UNREADABLE, RunFolder

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class JobEntry:
    """A job in ``sweep.json``."""

    name: str  # also of its folder
    overrides: list[str]
    identity: str  # the hash of its settings
    numerics: int = 0
    status: str = "waiting"  # the last status that the sweep's process recorded
    error: str | None = None
    queue: str | None = None  # its latest id in SLURM's queue
    run: str | None = None  # the id of its run, once it has begun

    @property
    def key(self) -> Identity:
        """The job's identity."""
        return Identity(self.identity, self.numerics)


@dataclass
class SweepFile:
    """The contents of a folder's ``sweep.json``."""

    folder: Path
    commands: list[str] = field(default_factory=list)  # without repetitions, the latest last
    entries: list[JobEntry] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> SweepFile:
        """Read the file of a sweep's folder; without a file, the contents are empty."""
        path = folder / SWEEP_FILE
        if not path.exists():
            return cls(folder)
        try:
            contents = json.loads(read_plain(path))
            commands = [str(each) for each in contents["commands"]]
            entries = [_entry(each) for each in contents["jobs"]]
        except (*UNREADABLE, RecursionError) as error:
            raise ConfigError(
                f"{path}: the list of jobs is broken ({in_one_line(error)}); move it away; klrl "
                "then finds the jobs by their folders"
            ) from error
        return cls(folder, commands, entries)

    @property
    def jobs(self) -> list[tuple[RunFolder, JobEntry]]:
        """Each entry with its job's run folder, which may not contain a run yet."""
        return [(RunFolder(self.folder / each.name), each) for each in self.entries]

    def write(self, command: str, entries: Sequence[JobEntry]) -> None:
        """Replace the file in one step; new entries replace old ones of the same name or job."""
        names, keys = {each.name for each in entries}, {each.key for each in entries}
        kept = [e for e in self.entries if e.name not in names and e.key not in keys]
        contents = {
            "klrl": __version__,
            "commands": [*(each for each in self.commands if each != command), command],
            "jobs": [asdict(each) for each in (*entries, *kept)],
        }
        replace_file(self.folder / SWEEP_FILE, json.dumps(contents, indent=1) + "\n")


def _entry(job: dict[str, Any]) -> JobEntry:
    known = {f.name: job[f.name] for f in fields(JobEntry) if job.get(f.name) is not None}
    known = {key: int(v) if key == "numerics" else str(v) for key, v in known.items()}
    name = known["name"]
    if name in ("", ".", "..") or {"/", "\0"} & {*name} or len(os.fsencode(name)) > 255:
        raise ValueError(f"name={name} is outside the sweep's folder")
    overrides = [str(each) for each in job["overrides"]]
    return JobEntry(**{**known, "overrides": overrides})
