"""Reads ``sweep.json``: the jobs of a sweep, also those that never started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.sweep.sweep_file import SWEEP_FILE, SweepFile


@dataclass(frozen=True)
class Planned:
    """One job in a sweep's record."""

    folder: Path
    overrides: list[str]
    status: str  # finished, running, interrupted, failed, refused or waiting
    error: str  # why it failed or was refused; empty if nothing is recorded

    @property
    def begun(self) -> bool:
        """Whether there is a run; its manifest is newer than the sweep's record."""
        return (self.folder / "manifest.json").is_file()


@dataclass(frozen=True)
class Sweep:
    """One sweep."""

    path: Path
    command: str  # the command line that started it; empty if it is not recorded
    jobs: list[Planned]


class Unreadable(ValueError):
    """A run or a sweep cannot be read; the message names the file and the reason."""


#: Hidden folders, and entries of checkpoints.
_NO_RUN = re.compile(r"\.|frames-\d+$")


def walk(root: Path, *, into_sweeps: bool) -> Iterator[tuple[Path, bool]]:
    """Folders of runs (True) and of sweeps (False) at or below a folder, in the order of names.

    Nothing below a run is looked at, nor a checkpoint's entry, which has a manifest of its own.
    """
    for name, below, files in os.walk(root):
        is_run = "manifest.json" in files
        if is_run or SWEEP_FILE in files:
            yield Path(name), is_run
            if is_run or not into_sweeps:
                below.clear()
        below[:] = sorted(each for each in below if not _NO_RUN.match(each))


def read_sweep(folder: Path) -> Sweep:
    """Read the ``sweep.json`` of a folder.

    Raises:
        Unreadable: it is broken.
    """
    try:
        file = SweepFile.read(folder)
    except ConfigError as error:
        raise Unreadable(str(error)) from error
    jobs = [
        Planned(folder / each.folder, each.overrides, each.status, each.error or "")
        for each in file.entries
    ]
    return Sweep(folder, file.commands[-1] if file.commands else "", jobs)
