"""Python functions that run a sweep and compare its runs, as the command line does.

sweep = klrl.multirun("sweep=first", "env=pendulum", "kl.coef=0.1,1", "seed=0,1,2")
sweep.summary(); sweep.figure("kl/ref/exact", out="fig.pdf"); sweep.report()
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klrl.api import Frame, Run, checked_words, columns_of
from klrl.base.text import warn
from klrl.config.given import Given
from klrl.config.overrides import flags, parse_args, separate
from klrl.report.figure import draw_figure
from klrl.report.measures import measured
from klrl.report.runs import Inventory, find_runs
from klrl.report.settings import Setting, by_task, count_runs, identity, names_of
from klrl.report.tables import as_html, results
from klrl.report.write import summary_rows, write_report
from klrl.runs.folder import new_path
from klrl.sweep.run import run_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Sweep(os.PathLike[str]):
    """The folder of a sweep, or of any runs. Each call reads the runs' files again.

    Runs that differ only in their seed form a setting. Finished and failed runs count and, if
    ``unfinished``, interrupted and running runs.

    Raises:
        ConfigError: the folder contains no run.
    """

    def __init__(self, folder: str | Path, *, unfinished: bool = False) -> None:
        self.folder, self._unfinished = Path(folder), unfinished
        self._inventory()

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        states = Counter(run.status for run in self._inventory().runs)
        counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return f"Sweep({str(self.folder)!r}: {counts})"

    def _repr_html_(self) -> str:
        tasks = by_task(self._settings()).values()
        return "".join(as_html(results(measured(settings))) for settings in tasks)

    @property
    def runs(self) -> list[Run]:
        """The runs that began, in the order of their folders' names."""
        return [Run(run.path) for run in self._inventory().runs]

    def frame(self) -> Frame:
        """Return all runs' rows as columns: run, task, setting, seed, and the metrics."""
        runs = self._inventory().runs
        names = names_of(runs)
        return columns_of(
            {"run": run.path.name, "task": run.task, "setting": names[identity(run)]}
            | {"seed": run.seed, **row}
            for run in runs
            for row in Run(run.path).rows
        )

    def summary(self) -> Frame:
        """Return a row per setting: means over seeds and 95 % intervals, as in ``summary.csv``."""
        tasks = by_task(self._settings()).values()
        return columns_of(summary_rows([each for of in tasks for each in measured(of)]))

    def figure(self, y: str | None = None, x: str | None = None, **options: Any) -> Figure:
        """Draw a metric, as ``klrl figure`` does; see :func:`klrl.report.figure.draw_figure`."""
        return draw_figure(self._settings(), y, x, **options)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the page of ``klrl report``, by default below the sweep; return its path."""
        to = self.folder / "report" if folder is None else Path(folder)
        return write_report(self._inventory(), to, unfinished=self._unfinished)

    def _inventory(self) -> Inventory:
        inventory = find_runs([str(self.folder)])
        for line in inventory.skipped:
            warn(f"klrl: skipped {line}")
        return inventory

    def _settings(self) -> list[Setting]:
        return count_runs(self._inventory().runs, unfinished=self._unfinished)


def multirun(
    *overrides: str, folder: str | Path | None = None, config_dir: str | Path | None = None
) -> Sweep:
    """Run a sweep, as ``klrl -m`` does. A job that fails does not end it; its run says why.

    Args:
        overrides: as on the command line: ``"kl.coef=0.1,1"``, ``"seed=range(5)"``,
            ``"launcher=joblib"``. With ``"sweep=NAME"``, the folder is ``outputs/NAME``, and a
            second call skips finished jobs and resumes interrupted ones.
        folder: a new folder; default: below ``outputs/``.
        config_dir: as in :func:`klrl.compose`.

    Raises:
        ConfigError: a job is invalid; then no job runs.
        Interrupted: Ctrl-C or SIGTERM stopped the sweep.
    """
    chosen = flags(str(config_dir) if config_dir else None)
    args = parse_args(["-m", *chosen, *checked_words(overrides)])
    path = separate(args.overrides, multirun=True).path
    if folder is not None or path is None:
        path = str(new_path("_sweep") if folder is None else folder)
        args.overrides.append(Given(f"hydra.sweep.dir={path}"))
    run_sweep(args)
    return Sweep(path)
