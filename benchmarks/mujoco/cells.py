"""Runs whose outcome is a line of a small committed file: a fresh clone goes on where one stopped.

A line holds what identifies its job, and everything that a page says of it; the run folder below
``outputs/`` may go.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mujoco import sb3
from benchmarks.peers.common import versions
from benchmarks.results import ROOT, commit, cpu_name
from benchmarks.shipped.sweeps import diverged
from klrl.config.checks import to_config
from klrl.config.compose import Composer, allow_new_keys
from klrl.config.identity import identity
from klrl.report.measures import BAND, WARM_UP, column
from klrl.report.runs import ReadRun, find_runs
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.runs.other_task import config_on_task
from klrl.train.evaluate import CLOSING, EvaluationPlan
from klrl.train.schedule import Size

Line = dict[str, Any]
#: Points of a recorded curve.
POINTS = 50
#: Share of a run's end, where the learning rate is nearly 0.
END = 0.05
#: The settings that Stable-Baselines3 runs: CleanRL's, and rl-baselines3-zoo's.
SB3, ZOO = "sb3", "sb3_zoo"
COMMON = ("logger=none", "eval.evaluations=1", "eval.final=100")


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str  # the preset, as in ``env=hopper``
    setting: str  # its name in tables
    seed: int  # of the run
    words: tuple[str, ...]  # what the setting gives on the command line

    @property
    def command(self) -> list[str]:
        """The words after ``python -m klrl``."""
        return [f"env={self.task}", f"seed={self.seed}", *COMMON, *self.words]

    @property
    def process(self) -> list[str]:
        """The words after ``python``."""
        if self.setting in (SB3, ZOO):
            words = ["--task", self.task, "--seed", str(self.seed)]
            return ["-m", "benchmarks.mujoco.sb3", *words, *["--zoo"] * (self.setting == ZOO)]
        return ["-m", "klrl", f"hydra.run.dir={self.folder}", *self.command]

    @property
    def prints(self) -> str | None:
        """The identity of a cell whose outcome is its last printed line; None: it is a run."""
        if self.setting not in (SB3, ZOO):
            return None
        return sb3.known_identity(self.task, self.seed, zoo=self.setting == ZOO)

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


_composer = Composer()


#: Older numerics whose cells still count. Numerics 3 changed the seeds of resets, which changes
#: every row but no expectation. Numerics 5 changed line searches that miss their target (the runs
#: of 4 have none), the rounding of TRPO's steps, and metrics that a cell does not have. Numerics 6
#: changed controller=held and learning from a KL in the loss alone, which no cell has, and the
#: standard deviation of observations that were constant in training, now 1.
COMPARABLE = (2, 4)


def job_identity(cell: Cell) -> str:
    """The settings' hash and the numerics, as ``0f3a...-2``."""
    if cell.prints is not None:
        return cell.prints
    own = identity(to_config(_composer.explained(allow_new_keys(cell.command))))
    return f"{own.settings}-{own.numerics}"


class Lines:
    """A file of JSON lines, one per finished cell; only added to, and never by reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole, _, self._torn = text.rpartition("\n")  # by a kill; its cell runs again
        self._known = {
            (line["name"], line["identity"]): line for line in map(json.loads, whole.splitlines())
        }

    def get(self, cell: Cell) -> Line | None:
        """What is known of a cell with the settings that it has today, measured today or before."""
        today = job_identity(cell)
        of = today.rpartition("-")[0] or today
        same = (today, *(f"{of}-{numerics}" for numerics in COMPARABLE))
        return next(filter(None, (self._known.get((cell.name, each)) for each in same)), None)

    def add(self, line: Line) -> None:
        """Append, in one write; a torn line goes first."""
        self._known[line["name"], line["identity"]] = line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._torn:
            whole = self.path.read_bytes().removesuffix(self._torn.encode())
            self.path.write_bytes(whole)
            self._torn = ""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run_cells(cells: Iterable[Cell], lines: Lines, jobs: int) -> list[str]:
    """Run what is missing, ``jobs`` at a time, write each down as it ends; returns what failed."""
    missing = [cell for cell in cells if lines.get(cell) is None]
    waiting, running, failed, done = list(reversed(missing)), dict[int, Cell](), list[str](), 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop()
                running[start(cell)] = cell
            pid, status, usage = os.wait3(0)
            cell, done = running.pop(pid), done + 1
            try:
                cpu = usage.ru_utime + usage.ru_stime
                line = read_cell(cell, os.waitstatus_to_exitcode(status), cpu)
            except RuntimeError as error:
                failed.append(f"{cell.name}: {error}; see {cell.log}")
                print(f"[{done}/{len(missing)}] {failed[-1]}", flush=True)
                continue
            lines.add(line)
            told = f"{line['return']:,.1f} +- {line['se']:.1f}, {line['cpu']:,.0f} CPU s"
            ended = f", {line['failed']}" if "failed" in line else ""
            print(f"[{done}/{len(missing)}] {cell.name}: {told}{ended}", flush=True)
    except KeyboardInterrupt:
        for pid in running:  # with what it started itself
            os.killpg(pid, signal.SIGTERM)
        for pid in running:
            os.waitpid(pid, 0)
        left = len(missing) - done
        raise SystemExit(f"interrupted; {left} of {len(missing)} runs are missing") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    return failed


def start(cell: Cell) -> int:
    """Start one from its beginning; its process id.

    What a stopped one left goes: it would hide part of the CPU time, or have other settings.
    """
    shutil.rmtree(cell.folder, ignore_errors=True)
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT)}
    with cell.log.open("wb") as file:
        to = [(os.POSIX_SPAWN_DUP2, file.fileno(), 1), (os.POSIX_SPAWN_DUP2, file.fileno(), 2)]
        command = [sys.executable, *cell.process]
        # A group of its own: Ctrl-C reaches it once, from here.
        return os.posix_spawn(command[0], command, environment, file_actions=to, setpgroup=0)


def read_cell(cell: Cell, code: int, cpu: float) -> Line:
    """The line of a run that ended."""
    if cell.prints is not None:
        if code:
            raise RuntimeError(f"exit {code}")
        told: Line = json.loads(cell.log.read_text().splitlines()[-1])
        return {**told, "versions": versions(), "commit": commit()}
    runs = find_runs([str(cell.folder)]).runs
    if not runs or (runs[0].status != "finished" and not diverged(runs[0])):
        raise RuntimeError(f"exit {code}")
    run = runs[0]
    about = {"name": cell.name, "identity": job_identity(cell), "words": list(cell.words)}
    line = {**about, **outcome(run), "cpu": round(cpu, 1), "machine": cpu_name()}
    line |= {"versions": run.manifest["versions"], "commit": run.manifest["git_commit"]}
    if diverged(run):
        line["failed"] = run.manifest["error"]
    return {**line, "curve": curve(run)}


def closing(run: ReadRun) -> Row:
    """The closing evaluation; of a diverged run, of its last checkpoint."""
    if not diverged(run):
        return {key: float(column(run, key)[-1]) for key in ("eval/return", "eval/return_se")}
    config = config_on_task(run.path, ())
    plan = EvaluationPlan(CLOSING, Size(config.eval.final), False, device_of("cpu"))
    return run.domain.function("evaluate")(run.path, config, plan, "last").row


def outcome(run: ReadRun) -> Line:
    """The numbers of a finished run: of its closing evaluation, and of KL(old||new) over it."""
    seconds, evaluation = column(run, "time/evaluation"), closing(run)
    training = column(run, "reward/episode")
    training = training[np.isfinite(training)]
    return {
        "return": evaluation["eval/return"],
        "se": evaluation["eval/return_se"],
        "training": known(_mean(training[-max(1, len(training) // 10) :])),
        "kl_old": known(_mean(column(run, "kl/old/exact")[run.trained])),
        "band": in_band(run, 1.0),
        "band_end": in_band(run, END),
        "evaluation_seconds": float(np.nansum(seconds)),
        "seconds": float(np.nansum(column(run, "time/iteration"))),
    }


def in_band(run: ReadRun, share: float) -> float | None:
    """Share of the last iterations with KL(old||new) within 1.5 times its target."""
    if "loss.dtarg" not in run.settings:
        return None
    kl = column(run, "kl/old/exact")[run.trained]
    annealed = column(run, "kl/old/target")[run.trained]
    target = np.where(np.isfinite(annealed), annealed, run.settings["loss.dtarg"])
    first = WARM_UP if share == 1 else len(kl) - max(1, round(share * len(kl)))
    away = np.abs(np.log(np.maximum(kl, 1e-12) / target))[first:]
    return float((away <= np.log(BAND)).mean()) if len(away) else None


def curve(run: ReadRun) -> Line:
    """Training return, KL(old||new), seconds of training, entropy and critic's loss over frames."""
    frames = column(run, run.axis)[run.trained]
    columns = {
        "return": column(run, "reward/episode")[run.trained],
        "kl_old": column(run, "kl/old/exact")[run.trained],
        "seconds": np.cumsum(column(run, "time/iteration")[run.trained]),
        "entropy": column(run, "policy/entropy")[run.trained],
        "critic": column(run, "loss/critic")[run.trained],
    }
    count = min(POINTS, len(frames))
    parts = np.array_split(np.arange(len(frames)), count) if count else []
    points: Line = {"frames": [int(frames[part[-1]]) for part in parts]}
    for name, values in columns.items():
        picked = [values[part[-1]] if name == "seconds" else _mean(values[part]) for part in parts]
        points[name] = [None if not np.isfinite(v) else float(f"{v:.5g}") for v in picked]
    return points


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if np.isfinite(value) else None


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")
