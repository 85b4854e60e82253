"""Finds the folders of runs and sweeps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from klrl.sweep.sweep_file import SWEEP_FILE

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
