"""Runs whose outcome is a line of a small committed file: a fresh clone goes on where one stopped.

A line holds what identifies its job, and everything that a page says of it; the run folder below
``outputs/`` may go.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mujoco import sb3
from benchmarks.results import ROOT, cpu_name
from klrl.config.checks import to_config
from klrl.config.compose import Composer, allow_env_kwargs
from klrl.config.identity import identity
from klrl.report.measures import BAND, WARM_UP, column
from klrl.report.runs import Run, find_runs

Line = dict[str, Any]
#: Points of a recorded curve.
POINTS = 50
#: Share of a run's end, where the learning rate is nearly 0.
END = 0.05
#: The setting that Stable-Baselines3 runs.
SB3 = "sb3"
COMMON = ("logger=none", "eval.evaluations=1", "eval.final=100")


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task: the preset, as in ``env=hopper``.
        setting: its name in tables.
        seed: of the run.
        words: what the setting gives on the command line.
    """

    task: str
    setting: str
    seed: int
    words: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The words after ``python -m klrl``."""
        return [f"env={self.task}", f"seed={self.seed}", *COMMON, *self.words]

    @property
    def name(self) -> str:
        """As in ``hopper clip 3``."""
        return f"{self.task} {self.setting} {self.seed}"

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path("outputs/mujoco") / self.task / f"{self.setting},seed={self.seed}"

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.folder.with_name(f"{self.folder.name}.log")


_composer, _composing = Composer(), threading.Lock()


def job_identity(cell: Cell) -> str:
    """The settings' hash and the numerics, as ``0f3a...-2``."""
    if cell.setting == SB3:
        return sb3.known_identity(cell.task, cell.seed)
    with _composing:
        own = identity(to_config(_composer.explained(allow_env_kwargs(cell.command))))
    return f"{own.settings}-{own.numerics}"


class Lines:
    """A file of JSON lines, one per finished cell; only added to.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._known = {
            (line["name"], line["identity"]): line for line in map(json.loads, text.splitlines())
        }

    def get(self, cell: Cell) -> Line | None:
        """What is known of a cell with the settings that it has today."""
        return self._known.get((cell.name, job_identity(cell)))

    def add(self, line: Line) -> None:
        """Append, in one write."""
        self._known[line["name"], line["identity"]] = line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run_cells(cells: Iterable[Cell], lines: Lines, jobs: int, curves: bool = True) -> None:
    """Run what is missing, ``jobs`` at a time, and write each down as it ends.

    Raises:
        SystemExit: runs failed; the others are done before.
    """
    missing = [cell for cell in cells if lines.get(cell) is None]
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run_cell, cell, curves): cell for cell in missing}
        for done, future in enumerate(as_completed(waiting), 1):
            cell = waiting[future]
            try:
                line = future.result()
            except RuntimeError as error:
                failed.append(f"{cell.name}: {error}")
                continue
            lines.add(line)
            told = f"{line['return']:,.1f} +- {line['se']:.1f}, {line['cpu']:,.0f} CPU s"
            print(f"[{done}/{len(missing)}] {cell.name}: {told}", flush=True)
    if failed:
        raise SystemExit("\n".join(failed))


def run_cell(cell: Cell, curves: bool) -> Line:
    """Run one from its beginning: what a stopped one left would hide part of its CPU time.

    Raises:
        RuntimeError: it failed.
    """
    if cell.setting == SB3:
        words = ["-m", "benchmarks.mujoco.sb3", "--task", cell.task, "--seed", str(cell.seed)]
        _run([sys.executable, *words], cell.log)
        line: Line = json.loads(cell.log.read_text().splitlines()[-1])
        return line
    shutil.rmtree(cell.folder, ignore_errors=True)
    words = [f"hydra.run.dir={cell.folder}", *cell.command]
    cpu = _run([sys.executable, "-m", "klrl", *words], cell.log)
    (run,) = find_runs([str(cell.folder)]).runs
    if run.status != "finished":
        raise RuntimeError(f"{run.status}; see {cell.folder.with_suffix('.log')}")
    about = {"name": cell.name, "identity": job_identity(cell), "words": list(cell.words)}
    return {**about, **outcome(run), "cpu": round(cpu, 1), "machine": cpu_name()} | (
        {"curve": curve(run)} if curves else {}
    )


def _run(command: Sequence[str], log: Path) -> float:
    """Run to the end; user and system seconds.

    Raises:
        RuntimeError: the exit code is not 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT)}
    with log.open("ab") as file:
        to = [(os.POSIX_SPAWN_DUP2, file.fileno(), 1), (os.POSIX_SPAWN_DUP2, file.fileno(), 2)]
        pid = os.posix_spawn(command[0], command, environment, file_actions=to)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"exit {os.waitstatus_to_exitcode(status)}; see {log}")
    return usage.ru_utime + usage.ru_stime


def outcome(run: Run) -> Line:
    """The numbers of a finished run: of its closing evaluation, and of KL(old||new) over it."""
    seconds = column(run, "time/evaluation")
    training = column(run, "reward/episode")
    training = training[np.isfinite(training)]
    return {
        "return": float(column(run, "eval/return")[-1]),
        "se": float(column(run, "eval/return_se")[-1]),
        "training": float(training[-max(1, len(training) // 10) :].mean()),
        "kl_old": float(column(run, "kl/old/exact")[run.trained].mean()),
        "band": in_band(run, 1.0),
        "band_end": in_band(run, END),
        "evaluation_seconds": float(np.nansum(seconds)),
        "seconds": float(np.nansum(column(run, "time/iteration"))),
    }


def in_band(run: Run, share: float) -> float | None:
    """Share of the last iterations with KL(old||new) within 1.5 times its target.

    Args:
        run: of a loss with a target; else None.
        share: of the iterations; 1 leaves out the first ten.
    """
    if "loss.dtarg" not in run.settings:
        return None
    kl = column(run, "kl/old/exact")[run.trained]
    annealed = column(run, "kl/old/target")[run.trained]
    target = np.where(np.isfinite(annealed), annealed, run.settings["loss.dtarg"])
    first = WARM_UP if share == 1 else len(kl) - max(1, round(share * len(kl)))
    away = np.abs(np.log(np.maximum(kl, 1e-12) / target))[first:]
    return float((away <= np.log(BAND)).mean()) if len(away) else None


def curve(run: Run) -> Line:
    """Training return, KL(old||new) and seconds of training over frames, in few points."""
    frames = column(run, run.axis)[run.trained]
    columns = {
        "return": column(run, "reward/episode")[run.trained],
        "kl_old": column(run, "kl/old/exact")[run.trained],
        "seconds": np.cumsum(column(run, "time/iteration")[run.trained]),
    }
    parts = np.array_split(np.arange(len(frames)), min(POINTS, len(frames)))
    points: Line = {"frames": [int(frames[part[-1]]) for part in parts]}
    for name, values in columns.items():
        picked = [values[part[-1]] if name == "seconds" else _mean(values[part]) for part in parts]
        points[name] = [None if not np.isfinite(v) else float(f"{v:.5g}") for v in picked]
    return points


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")
