"""The tables of the page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from klrl.report.frontier import KNOBS, EqualKL
from klrl.report.jobs import Job, count_states
from klrl.report.measures import Measure
from klrl.report.runs import Found
from klrl.report.settings import Setting, differing, show
from klrl.report.statistics import Estimate
from klrl.report.summary import Line


def equal_table(equal: EqualKL) -> str:
    """Reward at equal KL, a row per family; or what it would take."""
    title = "<h3>Reward at equal KL</h3>"
    if not equal.levels:
        return title + (
            f'<p class="soft">Needs a family with two settings of {" or ".join(KNOBS)} and the '
            "same seeds, and a range of KL that every seed of all such families covers.</p>"
        )
    head = ["", *(f"KL = {level:.4g} nats" for level in equal.levels)]
    rows = [[escape(name), *map(_cell, row)] for name, row in equal.families.items()]
    note = (
        f"Each family joins the settings that differ in {' or '.join(KNOBS)} alone; final reward "
        "is linear in sqrt(KL) between them, seed by seed."
    )
    return f'{title}{_table(head, rows)}<p class="soft">{note}</p>'


def summary_table(lines: Sequence[Line], measures: Sequence[Measure]) -> str:
    """Every measure of every setting, with its interval."""
    head = ["setting", "seeds"]
    for measure in measures:
        head.append(f"{escape(measure.title)}<small>{escape(measure.unit)}</small>")
    head.insert(3, "worst seed<small>final return</small>")
    rows = []
    for line in lines:
        cells = [_cell(line.estimates[measure.key]) for measure in measures]
        cells.insert(1, "" if line.worst is None else f"{line.worst:.5g}")
        rows.append([escape(line.setting.name), str(len(line.setting.runs)), *cells])
    return f"<h3>Numbers</h3>{_table(head, rows)}"


def _cell(value: Estimate | None) -> str:
    if value is None:
        return ""
    # The value alone where one seed stands alone, or all agree, as on a fixed coefficient.
    spread = value.low is not None and value.low != value.high
    interval = f"<small>{value.low:.4g} to {value.high:.4g}</small>" if spread else ""
    return f"{value.value:.5g}{interval}"


def differences(settings: Sequence[Setting]) -> str:
    """The settings whose values differ, a row per setting of the runs."""
    keys = differing([setting.settings for setting in settings])
    if not keys:
        return '<h3>What differs</h3><p class="soft">Nothing but the seed.</p>'
    rows = [
        [
            escape(each.name),
            *(escape(show(each.settings[k])) if k in each.settings else "" for k in keys),
        ]
        for each in settings
    ]
    return f"<h3>What differs</h3>{_table(['setting', *map(escape, keys)], rows)}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{top}</tr>\n{body}</table></div>'


def jobs_table(jobs: Sequence[Job], skipped: Sequence[str]) -> str:
    """The section of the jobs that did not finish, or are not among the statistics."""
    parts = ['<section id="jobs"><h2>Other jobs</h2>']
    if not jobs and not skipped:
        parts.append('<p class="soft">None: every job that was found is finished and counted.</p>')
    if jobs:
        parts.append(f"<p>{escape(count_states(jobs))}.</p>")
        head = ["state", "setting", "seed", "iterations", "error", "folder"]
        parts.append(_table(head, map(_job_row, jobs), "words"))
    if skipped:
        parts.append("<p>Skipped, since unreadable:</p>")
        parts.append(f"<pre>{escape(chr(10).join(skipped))}</pre>")
    return "".join(parts) + "</section>"


def _job_row(job: Job) -> Iterable[str]:
    state = job.state + "; counted" * job.counted
    return map(escape, (state, job.setting, job.seed, job.iterations, job.error, job.folder))


def commands(found: Found) -> str:
    """The section of the words that started sweeps and runs."""
    words = [sweep.command for sweep in found.sweeps] + [run.command for run in found.runs]
    text = escape("\n".join(dict.fromkeys(filter(None, words))))
    return f'<section id="commands"><h2>Commands</h2><pre>{text}</pre></section>'
