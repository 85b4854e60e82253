"""Finds and reads run folders and sweeps."""

from __future__ import annotations

import json
import math
import re
import shlex
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from klrl.base.errors import ConfigError
from klrl.base.files import ROWS, expanded, read_plain
from klrl.config.choices import CHOICES, NAME
from klrl.config.identity import canonical
from klrl.domains import Domain, recorded_domain
from klrl.report.listing import walk
from klrl.runs.folder import (
    UNREADABLE,
    RunFolder,
    read_manifest,
    read_settings,
    why_unreadable,
)
from klrl.runs.rows import each_row
from klrl.sweep.sweep_file import SweepFile

T = TypeVar("T")

#: Limit on the number of different metrics of a run; klrl's own are some hundred.
_MOST_METRICS = 10_000
#: Runs that differ only in these keys form one group of the report, a setting.
_NOT_SETTINGS = ("seed", "resume", "logger", "hydra", "launcher", "search", "sweep")


@dataclass(frozen=True)
class ReadRun:
    """The contents of a run folder."""

    path: Path
    status: str
    seed: int
    #: in the form of canonical, without _NOT_SETTINGS; with "numerics" from the manifest
    settings: dict[str, Any]
    columns: dict[str, NDArray[np.float64]]  # metric -> [rows]; NaN if a row lacks it
    command: str
    manifest: dict[str, Any]  # contents of ``manifest.json``; has ``error`` if the run failed
    domain: Domain

    @property
    def rows(self) -> int:
        """Number of recorded rows."""
        return len(next(iter(self.columns.values()), ()))

    @property
    def failed(self) -> bool:
        """True if an error ended the run, for example because it diverged."""
        return self.status == "failed"

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Mask of the rows, [rows]: False for row 0 if it is the evaluation before training."""
        return self.columns[self.axis] > 0 if self.rows else np.zeros(0, bool)

    @property
    def end(self) -> float:
        """The largest value on the x-axis; 0 without rows."""
        return float(np.nanmax(self.columns[self.axis])) if self.rows else 0.0

    @property
    def task(self) -> str:
        """The name of the environment; runs of different tasks never share a chart."""
        return str(self.settings.get("env.id") or self.settings.get("env") or "task")

    @property
    def axis(self) -> str:
        """The metric on the x-axis: frames or samples."""
        return self.domain.axis


@dataclass(frozen=True)
class Inventory:
    """The runs and sweeps below the given paths."""

    runs: list[ReadRun]
    skipped: list[str]  # one line per run or sweep that could not be read
    sweeps: list[SweepFile]  # without sweeps whose ``sweep.json`` could not be read


def find_runs(paths: Sequence[str]) -> Inventory:
    """Read every run and every sweep at or below the paths."""
    # Use resolved paths as keys, so that overlapping paths do not count a run twice.
    folders: dict[Path, Path] = {}
    swept: dict[Path, Path] = {}
    for path in paths:
        root = expanded(path)
        if not root.is_dir():
            what = "a file" if root.exists() else "no such folder"
            raise ConfigError(f"{path}: {what}; give run folders, or a folder of them")
        for folder, is_run in walk(root, into_sweeps=True):
            (folders if is_run else swept)[folder.resolve()] = folder
    if not folders and not swept:
        raise ConfigError(f"{' '.join(paths)}: no run there; give a folder with a manifest.json")
    skipped: list[str] = []
    runs = _readable(read_run, folders.values(), skipped)
    sweeps = _readable(SweepFile.read, swept.values(), skipped)
    marked = mark_own_seeds([run.settings for run in runs], [run.seed for run in runs])
    runs = [replace(run, settings=each) for run, each in zip(runs, marked, strict=True)]
    return Inventory(runs, skipped, sweeps)


def _readable(read: Callable[[Path], T], folders: Iterable[Path], skipped: list[str]) -> list[T]:
    """Read the folders; add a line to ``skipped`` for each unreadable folder."""
    results = []
    for folder in folders:
        try:
            results.append(read(folder))
        except ConfigError as error:
            skipped.append(str(error))
    return results


def read_run(folder: Path) -> ReadRun:
    """Read one run folder; refuse it if a file of the run is missing or broken."""
    try:
        manifest = read_manifest(folder)
        settings = by_override_key(canonical(read_settings(folder)))
        seed = int(settings.get("seed", manifest.get("seed", 0)))
        settings = {k: v for k, v in settings.items() if k.split(".")[0] not in _NOT_SETTINGS}
        settings["numerics"] = manifest["numerics"]
        metrics, domain = folder / "metrics.jsonl", recorded_domain(manifest)
        columns = read_columns(metrics) if metrics.is_file() else {}
        if columns and domain.axis not in columns:
            raise ConfigError(f"{metrics}: its rows have no {domain.axis}")
        return ReadRun(
            path=folder,
            status=RunFolder(folder).status,
            seed=seed,
            settings=settings,
            columns=columns,
            command=command_line(manifest.get("argv", [])),
            manifest=manifest,
            domain=domain,
        )
    except ConfigError:
        raise
    except (*UNREADABLE, MemoryError) as error:
        raise ConfigError(f"{folder}: {why_unreadable(error)}") from error


def by_override_key(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten settings to the command line's keys, such as ``loss`` and ``kl.coef``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        whole = above if key == NAME and above in CHOICES else f"{above}.{key}".lstrip(".")
        nested = by_override_key(value, whole) if isinstance(value, dict) else {}
        flat |= nested or {whole: value}  # an empty dictionary is a value
    return flat


def read_columns(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read ``metrics.jsonl`` as metric -> values, [rows]; a list of rows would take more memory.

    Lines that are no rows of the run are skipped and reported by :func:`klrl.runs.rows.each_row`.
    """
    try:
        lines = read_plain(path, ROWS).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    columns: dict[str, array[float]] = {}
    count = 0
    for count, row in enumerate(each_row(lines, path), 1):
        for name, value in row.items():
            column = columns.setdefault(name, array("d"))
            column.extend([math.nan] * (count - 1 - len(column)))
            column.append(math.nan if value is None else value)
        # A number takes more than 8 bytes of the file, unless most rows lack most metrics.
        if len(columns) > min(_MOST_METRICS, ROWS // 8 // count):
            raise ConfigError(f"{path}: its rows have too many metrics ({len(columns):,})")
    return {
        name: np.pad(column, (0, count - len(column)), constant_values=math.nan)
        for name, column in columns.items()
    }


def command_line(argv: Sequence[str]) -> str:
    """Format ``argv`` as ``python -m klrl ...``, without the paths of Python and klrl."""
    for i, argument in enumerate(argv):
        if i and (argument == "klrl" or argument.endswith(("/klrl", "/klrl/__main__.py"))):
            return shlex.join(["python", "-m", "klrl", *argv[i + 1 :]])
    return shlex.join(argv)


#: Settings whose value may be the path of a trained run.
_PATHS = ("actor.init", "reference.path")


def mark_own_seeds(
    settings: Sequence[dict[str, object]], seeds: Sequence[int]
) -> list[dict[str, object]]:
    """Replace ``seed=N`` by ``seed=*`` in paths of trained runs, if each seed has its own path.

    If seed 0 starts from ``outputs/base/seed=0`` and seed 1 from ``outputs/base/seed=1``, their
    settings become equal. If both start from ``outputs/base/seed=0``, the paths are unchanged.
    """
    result = [dict(each) for each in settings]
    others = [{k: v for k, v in each.items() if k not in _PATHS} for each in settings]
    alike = [json.dumps(each, sort_keys=True, default=str) for each in others]
    for key in _PATHS:
        together, marked = defaultdict(set), []
        for each, seed, rest in zip(result, seeds, alike, strict=True):
            pattern = rf"(?<![A-Za-z0-9.])seed={seed}(?!\d)"
            path, count = re.subn(pattern, "seed=*", str(each.get(key)))
            marked.append((rest, path) if count else None)
            together[marked[-1]].add(seed)
        for each, mark in zip(result, marked, strict=True):
            if mark and len(together[mark]) > 1:
                each[key] = mark[1]
    return result
