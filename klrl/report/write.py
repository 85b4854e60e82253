"""Writes a report: one self-contained page without a script, and its numbers in full as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from klrl.base.files import make_folder, replace_file
from klrl.base.text import counted, escaped, escaped_lines
from klrl.report import tables
from klrl.report.differences import Difference, differences_of
from klrl.report.equal_kl import KNOBS
from klrl.report.measures import SCORES, measured
from klrl.report.pictures import HEIGHT, WIDTH, Drawing, draw_charts, look_of
from klrl.report.runs import Inventory
from klrl.report.settings import Setting, by_task, count_runs, count_states, other_jobs
from klrl.report.statistics import ENOUGH

#: At first, the page draws this many settings (groups of runs that differ only in their seed).
SHOWN = 7


class Section(NamedTuple):
    """The page's section of one task."""

    settings: list[Setting]
    charts: list[Drawing]
    boxes: list[int]  # the settings, in the order of their boxes: by return; the first are drawn
    differences: list[Difference]


def write_report(inventory: Inventory, folder: Path, *, unfinished: bool = False) -> Path:
    """Write ``report.html`` and ``summary.csv``; return the page's path.

    Args:
        inventory: the runs and sweeps.
        folder: the output folder; made if missing.
        unfinished: if True, the statistics include interrupted and running runs.
    """
    counting = count_runs(inventory.runs, unfinished=unfinished)
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    tasks = [_task(f"chart-{i}", of) for i, of in enumerate(by_task(counting).values())]
    jobs = other_jobs(inventory, counting)
    runs = counted(sum(len(setting.runs) for setting in counting), "run")
    left_out = f"; not counted: {states}" if (states := count_states(jobs)) else ""
    page = folder / "report.html"
    replace_file(
        page, _page(tasks, jobs, inventory, f"{runs} counted of {len(inventory.runs)}{left_out}")
    )
    _write_summary(tasks, folder / "summary.csv")
    hint = "" if counting else "; --unfinished counts runs that did not finish"
    print(escaped(f"{page}: {runs} in {counted(len(counting), 'setting')}{left_out}{hint}"))
    return page


def _task(key: str, settings: Sequence[Setting]) -> Section:
    """Compute one task's section of the page; draw its charts."""
    settings = measured(settings)
    keys = [key for key in ("return", "gold") if key in settings[0].values]
    pairs = {key: differences_of(settings, key) for key in keys}
    returns = np.nan_to_num([setting.value("return") for setting in settings], nan=-np.inf)
    boxes = np.argsort(-returns, kind="stable").tolist()
    charts = draw_charts(settings, pairs, key)
    return Section(settings, charts, boxes, pairs["return"])


def _page(
    tasks: Sequence[Section], jobs: Sequence[tuple[str, str]], inventory: Inventory, counts: str
) -> str:
    """Make the page's HTML; the template escapes all text that was read from a folder."""
    files = PackageLoader("klrl.report", ".")
    environment = Environment(loader=files, autoescape=True, undefined=StrictUndefined)
    commands = [command for each in inventory.sweeps for command in each.commands[-1:]]
    page = environment.get_template("page.html").render(
        tables=tables,
        look_of=look_of,
        tasks=tasks,
        most=max((len(task.settings) for task in tasks), default=0),
        jobs=[escaped(each) for each in (*(line for _, line in jobs), *inventory.skipped)],
        counts=counts,
        versions=sorted({str(run.manifest.get("klrl", "?")) for run in inventory.runs}),
        commands=dict.fromkeys([*commands, *(run.command for run in inventory.runs)]),
        enough=ENOUGH,
        drawn=SHOWN,
        knobs=" or ".join(KNOBS),
        view=f"0 0 {WIDTH} {HEIGHT}",
    )
    return escaped_lines(page)


def summary_rows(settings: Sequence[Setting]) -> list[dict[str, object]]:
    """Return a row per setting: its task, name and seeds, and its estimates in full precision."""
    keys = dict.fromkeys(key for setting in settings for key in setting.estimates)
    parts = {"": "value", "_low": "low", "_high": "high", "_iqm": "iqm"}
    scored = {**parts, "_worst": "least"}  # a KL or a coefficient has no worst seed
    rows = []
    for each in settings:
        finished = sum(run.status == "finished" for run in each.runs)
        named = {"task": each.task, "setting": each.name}
        counts = {"seeds": len(each.runs), "finished": finished}
        known = {key: each.estimates.get(key) for key in keys}
        estimates = {
            f"{key}{part}": value and getattr(value, of)
            for key, value in known.items()
            # The least score is the worst; of a KL or a coefficient there is no worst.
            for part, of in (scored if key in SCORES else parts).items()
        }
        rows.append({**named, **counts, **estimates})
    return rows


def _write_summary(tasks: Sequence[Section], path: Path) -> None:
    """Write the estimates of every setting, task by task."""
    rows = summary_rows([setting for task in tasks for setting in task.settings])
    head = rows[0] if rows else ("task", "setting", "seeds", "finished")
    text = io.StringIO(newline="")
    csv.writer(text).writerows(
        [_plain(cell) for cell in row] for row in (head, *(each.values() for each in rows))
    )
    replace_file(path, text.getvalue())


def _plain(cell: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would read as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") else cell
