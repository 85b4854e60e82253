"""The tables of the page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from klrl.domains import Domain
from klrl.report.frontier import KNOBS, EqualKL
from klrl.report.measures import Line, Measure, recorded_metrics
from klrl.report.runs import Inventory, Run
from klrl.report.settings import Job, Setting, count_states, differing, show
from klrl.report.statistics import Estimate
from klrl.runs.metrics import Metric, metric_of


def equal_table(equal: EqualKL) -> str:
    """Reward at equal KL, a row per family; or what is missing for it."""
    title = "<h3>Reward at equal KL</h3>"
    if not equal.levels:
        return title + (
            f'<p class="soft">Needs a family with two settings of {" or ".join(KNOBS)} and the '
            "same seeds, and a range of KL that every seed of all such families covers.</p>"
        )
    head = [
        "family",
        *(
            f"KL = {equal.kl.show(each)}<small>{escape(equal.kl.unit)}</small>"
            for each in equal.levels
        ),
    ]
    rows = [
        [escape(name), *(_cell(value, equal.reward) for value in row)]
        for name, row in equal.families.items()
    ]
    note = (
        f"Each family joins the settings that differ in {' or '.join(KNOBS)} alone; final reward "
        "is linear in sqrt(KL) between them, seed by seed."
    )
    return f'{title}{_table("Reward at equal KL", head, rows)}<p class="soft">{note}</p>'


def summary_table(lines: Sequence[Line], measures: Sequence[Measure]) -> str:
    """Every measure of every setting, with its interval."""
    head = ["setting", "seeds"]
    for measure in measures:
        head.append(_head(measure.metric.title, measure))
    # The final score comes first; see measures().
    score = measures[0]
    head.insert(3, _head("worst seed", score))
    rows = []
    for line in lines:
        cells = [_cell(line.estimates[each.key], each.metric) for each in measures]
        cells.insert(1, "" if line.worst is None else score.metric.show(line.worst))
        rows.append([escape(line.setting.name), str(len(line.setting.runs)), *cells])
    return f"<h3>Numbers</h3>{_table('Numbers', head, rows)}"


def _head(title: str, measure: Measure) -> str:
    """Title, unit, and reduction over iterations, below each other."""
    below = (f"<small>{escape(text)}</small>" for text in (measure.metric.unit, measure.how))
    return escape(title) + "".join(below)


def _cell(value: Estimate | None, metric: Metric) -> str:
    if value is None:
        return ""
    # No interval with one seed, or if all seeds agree, as on a fixed coefficient.
    interval = ""
    if value.low is not None and value.high is not None and value.low != value.high:
        interval = f"<small>{metric.show(value.low)} to {metric.show(value.high)}</small>"
    return f"{metric.show(value.value)}{interval}"


def differences(settings: Sequence[Setting]) -> str:
    """The settings whose values differ, a row per setting of the runs."""
    keys = differing([setting.settings for setting in settings])
    if not keys:
        return '<h3>What differs</h3><p class="soft">Nothing but the seed.</p>'
    rows = [[escape(each.name), *(_value(each, key) for key in keys)] for each in settings]
    return f"<h3>What differs</h3>{_table('What differs', ['setting', *map(escape, keys)], rows)}"


def _value(setting: Setting, key: str) -> str:
    if key not in setting.settings:
        return ""
    return f'<span class="value">{escape(show(setting.settings[key]))}</span>'


def _table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """A table of HTML cells; the first of each row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f"<tr>{_row(list(row))}</tr>\n" for row in rows)
    table = f"<table{kind}><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    # tabindex lets the keyboard scroll a table that is wider than the window.
    return f'<div class="scroll" role="region" aria-label="{title}" tabindex="0">{table}</div>'


def _row(cells: Sequence[str]) -> str:
    first, *rest = cells
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest)


def jobs_table(jobs: Sequence[Job], skipped: Sequence[str]) -> str:
    """The section of the jobs that did not finish, or are not in the statistics."""
    parts = ['<section id="jobs"><h2>Other jobs</h2>']
    if not jobs and not skipped:
        parts.append('<p class="soft">None: every job that was found is finished and counted.</p>')
    if jobs:
        parts.append(f"<p>{escape(count_states(jobs))}.</p>")
        head = ["state", "setting", "seed", "iterations", "error", "folder"]
        parts.append(_table("Other jobs", head, map(_job_row, jobs), ' class="words"'))
    if skipped:
        parts.append("<p>Skipped, since unreadable:</p>")
        parts.append(f"<pre>{escape(chr(10).join(skipped))}</pre>")
    return "".join(parts) + "</section>"


def _job_row(job: Job) -> Iterable[str]:
    state, *rest = map(
        escape,
        (job.state, job.setting, job.seed, job.iterations, job.error, job.folder),
    )
    bad = ' class="bad"' * job.state.startswith(("failed", "refused"))
    return [f"<span{bad}>{state}</span>{'; counted' * job.counted}", *rest]


def metrics_table(runs: Sequence[Run]) -> str:
    """The section of the recorded metrics, one table per domain."""
    domains: dict[Domain, list[Run]] = {}
    for run in runs:
        domains.setdefault(run.domain, []).append(run)
    parts = ['<section id="metrics"><h2>Metrics</h2>']
    for domain, of in domains.items():
        if len(domains) > 1:
            parts.append(f"<h3>{escape(', '.join(dict.fromkeys(run.task for run in of)))}</h3>")
        each = [metric_of(name, domain) for name in recorded_metrics(of)]
        rows = [map(escape, (m.name, m.title, m.unit, m.what)) for m in each]
        head = ["metric", "title", "unit", "what it is"]
        parts.append(_table("Metrics", head, rows, ' class="words"'))
    return "".join(parts) + "</section>"


def commands(inventory: Inventory) -> str:
    """The section of the command lines that started sweeps and runs."""
    lines = [sweep.command for sweep in inventory.sweeps]
    lines += [run.command for run in inventory.runs]
    text = escape("\n".join(dict.fromkeys(filter(None, lines))))
    return f'<section id="commands"><h2>Commands</h2><pre>{text}</pre></section>'
