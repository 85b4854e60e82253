"""Compare runs in one offline page: ``klrl report PATH... [-o FOLDER]``."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from klrl.base.files import replace_file
from klrl.report.charts import first_shown, frontier_charts, learning_curves
from klrl.report.frontier import equal_kl
from klrl.report.measures import measures, summary_lines
from klrl.report.page import Task, make_page
from klrl.report.pictures import draw_charts
from klrl.report.runs import Inventory
from klrl.report.settings import Job, Setting, count, count_states, group_runs, names_of, other_jobs


def write_report(inventory: Inventory, folder: Path, *, unfinished: bool = False) -> Path:
    """Write ``report.html``, ``summary.csv`` and the PNGs; returns the page's path.

    Args:
        inventory: the runs and sweeps.
        folder: where to write; made if missing.
        unfinished: whether runs that did not finish count too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = names_of(inventory.runs)
    counted = [
        run for run in inventory.runs if run.rows and (unfinished or run.status == "finished")
    ]
    settings, replaced = group_runs(counted, names)
    stems = _stems(dict.fromkeys(setting.task for setting in settings))
    tasks = [_task(name, settings, folder / stem) for name, stem in stems.items()]
    jobs = other_jobs(inventory, counted, replaced, names)
    page = folder / "report.html"
    replace_file(page, make_page(tasks, jobs, inventory))
    _write_csv(tasks, folder / "summary.csv")
    print(_summary(page, settings, jobs))
    return page


def _summary(page: Path, settings: Sequence[Setting], jobs: Sequence[Job]) -> str:
    """One line on the page's contents."""
    runs = sum(len(setting.runs) for setting in settings)
    left_out = [job for job in jobs if not job.counted]
    parts = [f"{page}: {count(runs, 'run')} in {count(len(settings), 'setting')}"]
    if left_out:
        parts.append(f"not counted: {count_states(left_out)}")
    if not runs and any(job.iterations not in ("", "0") for job in left_out):
        parts.append("--unfinished counts runs that did not finish")
    return "; ".join(parts)


def _stems(names: Iterable[str]) -> dict[str, str]:
    """The prefix of each task's file names: plain letters and digits, unique."""
    stems: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "task"
        again = sum(other == stem or other.startswith(f"{stem}_again") for other in stems.values())
        stems[name] = f"{stem}_again{again}" if again else stem
    return stems


def _task(name: str, settings: Sequence[Setting], stem: Path) -> Task:
    """The section of one task; draws its PNGs."""
    members = [setting for setting in settings if setting.task == name]
    lines = summary_lines(members)
    curves, frontiers, shown = learning_curves(members), frontier_charts(lines), first_shown(lines)
    pictures = [f"{stem.name}_curves.png", f"{stem.name}_frontier.png"]
    titles = [setting.name for setting in members]
    draw_charts(curves, titles, shown, stem.with_name(pictures[0]))
    draw_charts(frontiers, titles, shown, stem.with_name(pictures[1]))
    runs = [run for setting in members for run in setting.runs]
    columns = [each for each in measures(runs) if any(line.estimates[each.key] for line in lines)]
    return Task(name, lines, columns, curves, frontiers, equal_kl(members), shown, pictures)


def _write_csv(tasks: Sequence[Task], path: Path) -> None:
    """Write the page's tables, one task after the other, in full precision."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        runs = [run for task in tasks for line in task.lines for run in line.setting.runs]
        keys = [measure.key for measure in measures(runs)] if runs else []
        ends = [f"{key}{end}" for key in keys for end in ("", "_low", "_high")]
        writer.writerow(["task", "setting", "seeds", "worst_return", *ends])
        for task in tasks:
            for line in task.lines:
                cells: list[float | None] = []
                for key in keys:
                    value = line.estimates.get(key)
                    cells += [value.value, value.low, value.high] if value else [None] * 3
                head = [task.name, line.setting.name, len(line.setting.runs), line.worst]
                writer.writerow([*head, *cells])
