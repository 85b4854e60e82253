"""Sweeps of a result: started through ``python -m klrl``, then read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from benchmarks.results import ROOT
from klrl.report.measures import column
from klrl.report.runs import ReadRun, find_runs

#: Below the working folder, as every run.
OUTPUTS = Path("outputs")
#: Episodes of a closing evaluation.
EPISODES = 100
#: The exit code of a sweep of which jobs failed.
FAILED = 1


@dataclass(frozen=True)
class Sweep:
    """One command line of many runs."""

    name: str  # of its folder below outputs/
    words: tuple[str, ...]  # as after python -m klrl -m
    labels: Mapping[str, str] = field(default_factory=dict)  # of all its runs
    alone: bool = False  # jobs take turns even where others run side by side: they are timed
    may_diverge: bool = False  # a NonFiniteError counts, as the run was at its last checkpoint

    @property
    def folder(self) -> Path:
        """Where its runs are."""
        return OUTPUTS / self.name

    def command(self, jobs: int) -> list[str]:
        """The words after ``python``."""
        side_by_side = ["launcher=joblib", f"launcher.n_jobs={jobs}"]
        own = side_by_side if jobs > 1 and not self.alone else []
        return ["-m", "klrl", "-m", f"sweep={self.name}", *own, *self.words]

    def run(self, jobs: int) -> None:
        """Run what is not finished yet; its lines go to the terminal.

        A run that diverged, and may, is not tried again: another try goes on from its checkpoint
        with other start states, and would be counted as if it were the first.
        """
        if self.may_diverge and self._ended():
            return
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, *self.command(jobs)], env=environment) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                # It was told, too, and writes its checkpoints: subprocess.run would kill it.
                code = process.wait() or 130
        if code and not (code == FAILED and self.may_diverge):
            raise SystemExit(code)

    def _ended(self) -> bool:
        """Whether every run is there, finished or diverged."""
        jobs = prod(len(word.partition("=")[2].split(",")) for word in self.words)
        runs = find_runs([str(self.folder)]).runs if self.folder.exists() else []
        return len(runs) == jobs and all(r.status == "finished" or diverged(r) for r in runs)

    def runs(self) -> list[Labelled]:
        """Its runs, in the order of their folders' names."""
        found = find_runs([str(self.folder)])
        ended = [
            f"{run.path}: {run.status}; a result is made of all runs, finished"
            for run in found.runs
            if run.status != "finished" and not (self.may_diverge and diverged(run))
        ]
        if found.skipped or ended:
            raise SystemExit("\n".join([*found.skipped, *ended]))
        return [Labelled(run, {**self.labels, **words_of(run.path.name)}) for run in found.runs]


@dataclass(frozen=True)
class Labelled:
    """A run and what a table says of it."""

    run: ReadRun
    labels: Mapping[str, str]  # of its sweep, and the swept words


def diverged(run: ReadRun) -> bool:
    """Whether a value of the run was NaN or infinite, which ended it."""
    return run.status == "failed" and str(run.manifest.get("error", "")).startswith("NonFinite")


def words_of(folder: str) -> dict[str, str]:
    """The swept words in a job folder's name, seed left out: ``a=1,seed=0`` -> ``{"a": "1"}``."""
    pairs = (word.partition("=") for word in folder.split(",") if "=" in word)
    return {key: value for key, _, value in pairs if key != "seed"}


def by_labels(runs: Sequence[Labelled], *names: str) -> dict[tuple[str, ...], list[ReadRun]]:
    """Runs grouped by the values of these labels, each group by seed."""
    groups: dict[tuple[str, ...], list[ReadRun]] = {}
    for each in runs:
        groups.setdefault(tuple(each.labels.get(n, "") for n in names), []).append(each.run)
    return {key: sorted(group, key=lambda run: run.seed) for key, group in groups.items()}


class Plays:
    """Evaluations of runs, kept in a file: they are the same at every start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, float]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def __call__(
        self, run: ReadRun, words: Sequence[str] = (), *, episodes: int, sampled: bool = False
    ) -> dict[str, float]:
        """What ``python -m klrl.evaluate RUN WORDS --episodes N [--sampled]`` prints."""
        from klrl.train.evaluate_run import evaluate_run

        key = " ".join([str(run.path), *words, str(episodes), str(sampled), run.manifest["ended"]])
        if key not in self._known:
            result = evaluate_run(run.path, words, episodes=episodes, sampled=sampled)
            self._known[key] = dict(result.row)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._known, indent=1))
        return self._known[key]


def closing_return(run: ReadRun, plays: Plays) -> float:
    """Mean return of :data:`EPISODES` deterministic episodes of the last policy.

    That of the last row where the run recorded it; else played now. Either way all runs of a task
    have the same start states.
    """
    episodes, value = (column(run, f"eval/{name}")[-1] for name in ("episodes", "return"))
    if episodes >= EPISODES:
        return float(value)
    return plays(run, episodes=EPISODES)["eval/return"]
