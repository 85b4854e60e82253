"""Writes the offline page that compares runs: ``klrl report PATH... [-o FOLDER]``."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from klrl.base.files import make_folder, replace_file
from klrl.base.text import counted, escaped
from klrl.report.charts import against_kl, first_shown, learning_curves
from klrl.report.differences import Difference, differences_of
from klrl.report.measures import summary_lines
from klrl.report.outcomes import count_runs
from klrl.report.page import TaskSection, make_page
from klrl.report.pictures import draw_chart, draw_charts
from klrl.report.runs import Inventory
from klrl.report.settings import LeftOut, Setting, count_states, names_of, other_jobs


def write_report(
    inventory: Inventory, folder: Path, *, unfinished: bool = False, failed: str = "last"
) -> Path:
    """Write ``report.html``, the CSVs and the pictures; return the page's path.

    Args:
        inventory: the runs and sweeps.
        folder: the output folder; made if missing.
        unfinished: if True, the statistics include interrupted and running runs.
        failed: the score of a failed run: its own final value (last), or the lowest of any run of
            the task (worst).
    """
    of = count_runs(inventory.runs, unfinished=unfinished)
    stems = _stems(dict.fromkeys(setting.task for setting in of.settings))
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    tasks = [
        _task(name, [each for each in of.settings if each.task == name], folder / stem, failed)
        for name, stem in stems.items()
    ]
    runs = [run for setting in of.settings for run in setting.runs]
    jobs = other_jobs(inventory, runs, of.replaced, names_of(inventory.runs))
    page = folder / "report.html"
    replace_file(page, make_page(tasks, jobs, inventory))
    _write_summary(tasks, folder / "summary.csv")
    _write_differences(tasks, folder / "differences.csv")
    print(_summary(page, of.settings, jobs))
    return page


def _summary(page: Path, settings: Sequence[Setting], jobs: Sequence[LeftOut]) -> str:
    """Summarise the page's contents in a line."""
    runs = sum(len(setting.runs) for setting in settings)
    left_out = [job for job in jobs if not job.counted]
    parts = [f"{page}: {counted(runs, 'run')} in {counted(len(settings), 'setting')}"]
    if left_out:
        parts.append(f"not counted: {count_states(left_out)}")
    if not runs and any(job.iterations not in ("", "0") for job in left_out):
        parts.append("--unfinished counts runs that did not finish")
    return escaped("; ".join(parts))


def _stems(names: Iterable[str]) -> dict[str, str]:
    """Map each task to a unique prefix of its file names, made of letters, digits and ``_``."""
    stems: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "task"
        again = sum(other == stem or other.startswith(f"{stem}_again") for other in stems.values())
        stems[name] = f"{stem}_again{again}" if again else stem
    return stems


def _task(name: str, settings: Sequence[Setting], stem: Path, failed: str) -> TaskSection:
    """Make one task's section of the page; draw its charts."""
    lines = summary_lines(settings, failed)
    keys = [key for key in ("return", "gold", "eval_return") if key in lines[0].values]
    differences: dict[str, list[Difference]] = {key: differences_of(lines, key) for key in keys}
    curves, fronts = learning_curves(lines), against_kl(lines, differences)
    charts, shown = [*fronts, *curves], first_shown(lines)
    pictures = []
    for what, drawn in (
        ("curves", [chart for chart in curves if chart.result]),
        ("frontier", fronts),
        ("more", [chart for chart in curves if not chart.result]),
    ):
        if drawn:
            pictures += draw_charts(drawn, shown, stem.with_name(f"{stem.name}_{what}"))
    drawings = [(each, draw_chart(each, f"{stem.name}-{i}")) for i, each in enumerate(charts)]
    return TaskSection(name, lines, drawings, shown, pictures, differences["return"])


def _write_summary(tasks: Sequence[TaskSection], path: Path) -> None:
    """Write the estimates of every setting in full precision, task by task."""
    keys = list(dict.fromkeys(key for task in tasks for key in task.lines[0].estimates))
    parts = {"": "value", "_low": "low", "_high": "high", "_iqm": "iqm"}
    rows = []
    for task in tasks:
        for line in task.lines:
            estimates = [line.estimates.get(key) for key in keys]
            cells = [each and getattr(each, of) for each in estimates for of in parts.values()]
            seeds = len(line.setting.runs)
            finished = sum(run.status == "finished" for run in line.setting.runs)
            rows.append([task.name, line.setting.name, seeds, finished, line.worst, *cells])
    head = ["task", "setting", "seeds", "finished", "worst_return"]
    _write_csv(path, [*head, *(f"{key}{part}" for key in keys for part in parts)], rows)


def _write_differences(tasks: Sequence[TaskSection], path: Path) -> None:
    def row(task: TaskSection, each: Difference) -> list[object]:
        names = [task.lines[i].setting.name for i in (each.a, each.b)]
        numbers = [each.value, each.low, each.high, each.p, each.more, each.least]
        return [task.name, *names, *numbers, str(each.paired).lower()]

    rows = [row(task, each) for task in tasks for each in task.differences]
    head = ["task", "a", "b", "a_minus_b", "low", "high", "p_holm", "p_a_above_b", "least_seen"]
    _write_csv(path, [*head, "paired"], rows)


def _write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(head)
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    replace_file(path, text.getvalue())


def _plain(cell: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would read as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") else cell
