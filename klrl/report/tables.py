"""The tables of the page, as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from klrl.base.digits import number, places, span
from klrl.base.digits import show as show_number
from klrl.domains import Domain
from klrl.report.aggregate import Aggregate, Scale, against_best
from klrl.report.differences import ALL_PAIRS, Difference, shown
from klrl.report.dots import dots
from klrl.report.equal_kl import KNOBS, EqualKL
from klrl.report.measures import (
    Line,
    Measure,
    last_evaluated,
    recorded_metrics,
    reward_metric,
)
from klrl.report.outcomes import returns_text, seeds_text
from klrl.report.runs import Inventory, Run
from klrl.report.settings import Job, Setting, count, count_states, differing, show
from klrl.report.statistics import ENOUGH, Estimate
from klrl.runs.metrics import heading, metric_of
from klrl.runs.returns import with_error

#: A table of more rows scrolls in its own box, so that the charts below it stay in reach.
TALL = 16
#: A table whose second column is a name too.
FOLLOWS = ' class="pairs"'


def equal_table(equal: EqualKL) -> str:
    """Return at equal KL, a row per family; or what is missing for it."""
    title = f"<h3>{heading(equal.reward.title)} at equal KL</h3>"
    if not equal.levels:
        return title + (
            f'<p class="soft">Needs a family with two settings of {" or ".join(KNOBS)} and the '
            "same seeds, and a range of KL that every seed of all such families covers.</p>"
        )
    head = [
        "family",
        *(f"KL = {number(each, 3)}<small>{escape(equal.kl.unit)}</small>" for each in equal.levels),
    ]
    rows = [[escape(name), *map(_estimate, row)] for name, row in equal.families.items()]
    note = (
        f"Each family joins the settings that differ in {' or '.join(KNOBS)} alone; the final "
        "value is linear in sqrt(KL) between them, seed by seed."
    )
    return f'{title}{_table("At equal KL", head, rows)}<p class="soft">{note}</p>'


#: Measures of the first table; the others stand below the fold.
RESULTS = ("return", "eval_return", "eval_best", "gold", "eval_gold", "kl_ref", "kl_ref_token")


def result_table(
    lines: Sequence[Line], measures: Sequence[Measure], short: Mapping[int, int]
) -> str:
    """Scores and KL of every setting: mean and interval, interquartile mean, worst seed.

    ``short``: index of a setting -> how many of its runs ended early.
    """
    chosen = [measure for measure in measures if measure.key in RESULTS]
    head = ["setting", "seeds<small>finished</small>", *map(_head, chosen)]
    # Of one seed they would say the same again.
    several = any(len(line.setting.runs) > 1 for line in lines)
    beside = several and bool(chosen) and chosen[0].key == "return"
    if beside:
        head[3:3] = ["IQM", "worst seed"]
    rows = []
    for i, line in enumerate(lines):
        cells = [_cell(line, each.key) for each in chosen]
        score = line.estimates["return"]
        if beside and score is not None:
            decimals = places(score.value, score.error)
            cells[1:1] = [show_number(each, decimals) for each in (score.iqm, score.least)]
        elif beside:
            cells[1:1] = ["", ""]
        below = (f"{short[i]} short" if i in short else "", returns_text(line))
        seeds = seeds_text(line.setting) + "".join(f"<small>{b}</small>" for b in below if b)
        rows.append([escape(line.setting.name), seeds, *cells])
    return _table("Results", head, rows)


def other_numbers(lines: Sequence[Line], measures: Sequence[Measure]) -> str:
    """The measures that are no results: coefficients, trust region, speed."""
    chosen = [measure for measure in measures if measure.key not in RESULTS]
    head = ["setting", *map(_head, chosen)]
    rows = [
        [escape(line.setting.name), *(_cell(line, each.key) for each in chosen)] for line in lines
    ]
    return f"<h3>Other numbers</h3>{_table('Other numbers', head, rows)}" if chosen else ""


def runs_table(lines: Sequence[Line]) -> str:
    """Every run: its final return, and its closing evaluations with their standard errors."""
    runs = [run for line in lines for run in line.setting.runs]
    domain, evaluated = runs[0].domain, ["eval/return", "eval/best_return"]
    kept = [name for name in evaluated if any(name in run.columns for run in runs)]
    titles = (metric_of(name, domain) for name in (reward_metric(runs), *kept))
    head = ["setting", "seed", "state", *(f"{escape(each.title)}" for each in titles)]
    rows = [_run_row(line, i, kept) for line in lines for i in range(len(line.setting.runs))]
    note = (
        f"After +- the standard error over the {domain.episode}s of a run's own evaluation; how "
        "far seeds lie apart stands in the first table."
    )
    below = f'<p class="soft">{note}</p>' if kept else ""
    return f"<h3>Runs</h3>{_table('Runs', head, rows)}{below}"


def _run_row(line: Line, i: int, evaluated: Sequence[str]) -> list[str]:
    run, value = line.setting.runs[i], float(line.values["return"][i])
    state = escape(run.status)
    state = f'<span class="bad">{state}</span>' if run.failed else state
    score = "" if math.isnan(value) else number(value, 4)
    row = last_evaluated(run, "eval/return")
    # The first of them says of both how they were played.
    cells = [with_error(row, name, run.domain) if name in row else "" for name in evaluated]
    if "eval/return" in row:
        sampled = run.domain.evaluation.startswith("sampled")
        episodes = count(int(row.get("eval/episodes", 0)), run.domain.episode)
        how = "sampled" if sampled else run.domain.mode
        cells[0] += f"<small>{episodes}, {how}</small>"
    return [escape(line.setting.name), str(run.seed), state, score, *cells]


def _head(measure: Measure) -> str:
    """Title, unit, and reduction over iterations, below each other."""
    below = (f"<small>{escape(text)}</small>" for text in (measure.metric.unit, measure.how))
    return escape(measure.metric.title) + "".join(below)


def _cell(line: Line, key: str) -> str:
    """A measure of a setting, with how many seeds have it where not all have."""
    value, runs = line.estimates[key], len(line.setting.runs)
    cell = _estimate(value)
    # Of returns the first columns tell.
    if value is None or value.seeds == runs or key == "return":
        return cell
    return f"{cell}<small>{value.seeds} of {runs}</small>"


def _estimate(value: Estimate | None) -> str:
    """The mean, and below it its interval; below five seeds the range, and below it the mean."""
    if value is None:
        return ""
    decimals = places(value.value, value.error)
    mean = show_number(value.value, decimals)
    # No interval with one seed, or where all seeds agree, as on a fixed coefficient.
    if value.least == value.most:
        return mean
    if value.low is None or value.high is None:
        return f"{span(value.least, value.most, decimals)}<small>mean {mean}</small>"
    return f"{mean}<small>{span(value.low, value.high, decimals)}</small>"


def differences_table(lines: Sequence[Line], differences: Sequence[Difference]) -> str:
    """Differences of final returns; or what is missing for them."""
    title = "<h3>Differences</h3>"
    if len(lines) < 2:
        return ""
    if not differences:
        text = f"Needs two settings of {ENOUGH} seeds. With fewer, look at the points and ranges."
        return f'{title}<p class="soft">{text}</p>'
    names = [escape(line.setting.name) for line in lines]
    head = ["A", "B", "A - B<small>95 % interval</small>", "p<small>Holm</small>"]
    head += ["P(A &gt; B)", "seeds"]
    rows = [_difference_row(each, names) for each in shown(differences, lines)]
    kind = "Every pair" if len(lines) <= ALL_PAIRS else "Each setting against the best"
    note = (
        f"{kind}; p is after Holm over all {len(differences)} pairs, so bold differences all hold "
        "together at 5 %. The interval is that of the pair alone. Paired: both settings start each "
        "seed from the same trained model."
    )
    return f'{title}{_table("Differences", head, rows, FOLLOWS)}<p class="soft">{note}</p>'


def _difference_row(each: Difference, names: Sequence[str]) -> list[str]:
    # The better one comes first.
    if each.value < 0:
        each = each.turned()
    decimals = places(each.value, (each.high - each.low) / 4)
    value = show_number(each.value, decimals, signed=True)
    if each.significant:
        value = f"<strong>{value}</strong>"
    return [
        names[each.a],
        names[each.b],
        f"{value}<small>{span(each.low, each.high, decimals)}</small>",
        show_p(each.p),
        f"{each.more:.2f}",
        "paired" if each.paired else "independent",
    ]


def show_p(p: float) -> str:
    """As ``.03``, two digits, or ``< .001``."""
    return "&lt; .001" if p < 0.001 else f"{p:.2g}".removeprefix("0") if p < 1 else "1"


def aggregate_section(
    settings: Sequence[Aggregate], scale: Scale, score: str, pictures: Sequence[str]
) -> str:
    """The section of the settings over all tasks, with links to the pictures beside the page."""
    title = '<section id="tasks"><h2>All tasks</h2>'
    ends = ", ".join(
        f"{escape(t)} {low:g} = 0 and {high:g} = 1" for t, (low, high) in scale.items()
    )
    if not settings:
        return f"{title}<p>No setting has the same name in every task.</p></section>"
    rows = [_aggregate_row(each) for each in settings]
    head = [
        "setting",
        "seeds<small>of each task</small>",
        "mean<small>95 % interval</small>",
        "IQM<small>95 % bootstrap interval</small>",
    ]
    best, others = against_best(settings)
    below = ""
    if others:
        compared = [
            [
                escape(each.name),
                f"{d.value:+.3f}<small>{d.low:.3f} to {d.high:.3f}</small>",
                show_p(each.p),
                f"{each.more:.2f}",
            ]
            for each in others
            for d in [each.difference]
        ]
        top = ["other", "best - other<small>95 % interval</small>", "p<small>Holm</small>"]
        table = _table("Best against others", [*top, "P(best &gt; other)"], compared)
        below = f"<p>Best: {escape(best)}</p>{table}"
    weights = "Every task weighs the same."
    if not all(each.equal_seeds for each in settings):
        weights = (
            "Every task weighs the same in the mean. Where tasks have unequal numbers of seeds, "
            "a task of more seeds weighs more in the IQM, which has no interval then."
        )
    note = (
        f"Final {score}s, normalised as you gave it: {ends}. {weights} The IQM is over all runs of "
        "all tasks. Intervals assume no rare bad seeds."
    )
    figure = (
        f'{dots(settings, list(scale), score)}<p class="soft">As pictures: {links(pictures)}</p>'
    )
    table = _table("All tasks", head, rows)
    return f'{title}{table}{figure}{below}<p class="soft">{note}</p></section>'


def links(names: Iterable[str]) -> str:
    """Files beside the page."""
    return ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in names)


def _aggregate_row(each: Aggregate) -> list[str]:
    mean, middle = f"{each.mean.value:.3f}", f"{each.iqm:.3f}"
    if each.seeds >= ENOUGH:
        mean += f"<small>{each.mean.low:.3f} to {each.mean.high:.3f}</small>"
    if each.iqm_low is not None and each.iqm_high is not None:
        middle += f"<small>{each.iqm_low:.3f} to {each.iqm_high:.3f}</small>"
    most = max(map(len, each.scores))
    seeds = str(most) if each.equal_seeds else f"{each.seeds} to {most}"
    return [escape(each.name), seeds, mean, middle]


def settings_table(settings: Sequence[Setting]) -> str:
    """The settings whose values differ, a row per setting of the runs."""
    keys = differing([setting.settings for setting in settings])
    if not keys:
        return '<h3>What differs</h3><p class="soft">Nothing but the seed.</p>'
    rows = []
    for each in settings:
        shown = {key: escape(show(value)) for key, value in each.settings.items()}
        cells = (f'<span class="value">{shown[k]}</span>' if k in shown else "" for k in keys)
        rows.append([escape(each.name), *cells])
    return f"<h3>What differs</h3>{_table('What differs', ['setting', *map(escape, keys)], rows)}"


def _table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """A table of HTML cells; the first of each row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>\n')
    body, tall = "".join(lines), " tall" * (len(lines) > TALL)
    table = f"<table{kind}><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    # tabindex lets the keyboard scroll a table that is wider than the window.
    return (
        f'<div class="scroll{tall}" role="region" aria-label="{title}" tabindex="0">{table}</div>'
    )


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
    told = (job.state, job.setting, job.seed, job.iterations, job.error, job.folder)
    state, *rest = map(escape, told)
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
