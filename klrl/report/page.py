"""The page: one self-contained HTML file with data, script and style."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from klrl.report.charts import SHOWN, Chart, Point
from klrl.report.differences import Difference
from klrl.report.equal_kl import EqualKL
from klrl.report.measures import Line, Measure
from klrl.report.outcomes import seeds_text
from klrl.report.runs import Inventory
from klrl.report.settings import Job, count, count_states
from klrl.report.statistics import ENOUGH
from klrl.report.tables import (
    commands,
    differences_table,
    equal_table,
    jobs_table,
    links,
    metrics_table,
    other_numbers,
    result_table,
    runs_table,
    settings_table,
)

#: "How to read this page": term and explanation.
_READING = (
    ("setting", "runs that differ in their seed alone; its name says how it differs from others"),
    (
        "final",
        "mean over the last tenth of a run's iterations; coefficients and evaluation: the last",
    ),
    (
        "over seeds",
        f"from {ENOUGH} seeds on the mean with its 95 % interval (Student's t), which assumes no "
        "rare bad seeds; with fewer their range and mean, and no interval. IQM: the interquartile "
        "mean",
    ),
    (
        "3 of 5",
        "five seeds, three of which finished. A failed seed counts: by default as the mean over "
        "the last tenth of what it recorded",
    ),
    (
        "4 of 5 have a return",
        "in one finished seed no episode ended; it is in no number of that column",
    ),
    ("short", "runs that ended before the frames that the task's runs ask for"),
    (
        "differences",
        "Welch's t; p is after Holm over all pairs. P(A > B): the chance that a run of A returns "
        "more than a run of B",
    ),
    (
        "front",
        "filled and joined: no other setting has significantly more at no more KL",
    ),
    (
        "KL(policy||reference)",
        "the regulariser, weighted by kl.coef; charts have its square root, since the KL of a "
        "small step grows with the square of its length",
    ),
    ("KL(old||new)", "the trust region of one iteration; loss.beta keeps it near loss.dtarg"),
    (
        "in band",
        "share of the iterations after the tenth with KL(old||new) within a factor 1.5 of "
        "loss.dtarg",
    ),
    (
        "charts",
        "point at one, tap it, or walk along it with the arrow keys, for its values; the boxes "
        "choose the settings that are drawn",
    ),
)
_POINTS = (
    "Against KL: small marks are seeds (crosses: failed ones), large marks their means, bars 95 % "
    "intervals. Curves: thin lines are seeds (a cross where one failed, then broken: what it "
    "counts as), thick lines means, bands 95 % intervals; below the fold marks at the end are "
    f"seeds. Intervals from {ENOUGH} seeds on; they assume no rare bad seeds."
)
_FRONT = " Filled and joined: the front, where no setting has significantly more at no more KL."
_NO_FRONT = f" No front is drawn: it takes two settings of {ENOUGH} seeds."
_GOLD = (
    " The reward is a proxy of the gold score: where the gold score falls while the KL grows and "
    "the reward rises, the reward is over-optimised."
)


@dataclass(frozen=True)
class Task:
    """The page's section of one task."""

    name: str
    lines: list[Line]
    measures: list[Measure]
    curves: list[Chart]
    fronts: list[Chart]
    equal: EqualKL
    shown: list[int]  # indices of the settings that are drawn at first
    pictures: list[str]
    differences: list[Difference]
    remarks: list[str]
    short: dict[int, int]  # index of a setting -> how many of its runs ended early
    labels: list[str]

    @property
    def charts(self) -> list[Chart]:
        """In the order of the page: results first."""
        return [*self.fronts, *sorted(self.curves, key=lambda chart: not chart.result)]


def make_page(
    tasks: Sequence[Task], jobs: Sequence[Job], inventory: Inventory, together: str = ""
) -> str:
    """The page's HTML; ``together`` is the section of all tasks, empty if there is none."""
    scripts, style = [_file("chart.js"), _file("page.js")], _file("page.css")
    links = [f'<a href="#task-{i}">{escape(task.name)}</a>' for i, task in enumerate(tasks)]
    links += ['<a href="#tasks">All tasks</a>'] if together else []
    links += [
        f'<a href="#{part.lower().split()[-1]}">{part}</a>'
        for part in ("Other jobs", "Metrics", "Commands")
    ]
    counted = sum(len(line.setting.runs) for task in tasks for line in task.lines)
    runs = f"{count(counted, 'run')} counted of {len(inventory.runs)}"
    left_out = [job for job in jobs if not job.counted]
    runs += f" ({count_states(left_out)})" if left_out else ""
    versions = sorted({str(run.manifest.get("klrl", "?")) for run in inventory.runs}) or ["?"]
    reading = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in _READING)
    body = [
        "<h1>klrl report</h1>",
        f"<p>{escape(runs)}; klrl {escape(', '.join(versions))}; "
        '<a href="summary.csv">summary.csv</a>, '
        '<a href="differences.csv">differences.csv</a></p>',
        f'<nav aria-label="Parts">{"".join(links)}</nav>',
        f"<details><summary>How to read this page</summary><dl>{reading}</dl></details>",
        "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>",
        "" if tasks else _nothing(jobs),
        *(_section(i, task) for i, task in enumerate(tasks)),
        together,
        jobs_table(jobs, inventory.skipped),
        metrics_table([run for run in inventory.runs if run.rows]),
        commands(inventory),
        '<div id="tip" role="status"></div>',
        f'<script type="application/json" id="data">{_embed([_data(t) for t in tasks])}</script>',
        *(f"<script>{script}</script>" for script in scripts),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, style)}">'
        "<title>klrl report</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{style}</style></head>'
    )
    return f"{head}<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"


def _nothing(jobs: Sequence[Job]) -> str:
    """A remedy where no run counts."""
    begun = any(job.iterations not in ("", "0") for job in jobs)
    remedy = " <code>--unfinished</code> counts those below that have iterations." * begun
    return f"<p>No run here is finished, so there is nothing to compare yet.{remedy}</p>"


def _file(name: str) -> str:
    return resources.files("klrl.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], style: str) -> str:
    """The content security policy: these scripts, this style, this page's own icon, no network."""
    allowed = " ".join(map(_source_hash, scripts))
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_source_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _source_hash(text: str) -> str:
    """A source as the policy names it: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed(data: Any) -> str:
    """JSON that cannot end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _data(task: Task) -> dict[str, Any]:
    settings = [line.setting for line in task.lines]
    return {
        "settings": task.labels,
        "seeds": [seeds_text(setting) for setting in settings],
        # Where each run failed; null if it did not.
        "failed": [[run.end if run.failed else None for run in s.runs] for s in settings],
        "shown": task.shown,
        "charts": [_chart_data(chart) for chart in task.charts],
    }


def _chart_data(chart: Chart) -> dict[str, Any]:
    series = []
    for i, points in chart.series.items():
        one = {"i": i, "points": [[_round(point.x), *_numbers(point)] for point in points]}
        # A run per row, a point of the curve per column.
        one["seeds"] = [list(map(_round, each)) for each in np.array([p.seeds for p in points]).T]
        if points[0].across:
            one["places"] = list(map(_round, points[0].places))
        series.append(one)
    labels = {"title": chart.title, "x": chart.x, "y": chart.y, "digits": chart.digits}
    return {
        **labels,
        "log": chart.log,
        "result": chart.result,
        "floor": chart.floor,
        "front": chart.front,
        "series": series,
    }


def _numbers(point: Point) -> list[float | None]:
    y, across = point.y, point.across
    ends = [_round(across.low), _round(across.high)] if across else []
    return [_round(y.value), _round(y.low), _round(y.high), y.seeds, *ends]


def _round(value: float | None) -> float | None:
    """Six digits: more than a chart shows, in a third of the bytes."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _section(index: int, task: Task) -> str:
    few = (
        f"<p>Drawn at first: the {SHOWN} settings with the highest final return.</p>"
        if len(task.shown) < len(task.lines)
        else ""
    )
    results = sum(chart.result for chart in task.charts)
    told = "".join(f"<p><strong>{escape(each)}</strong></p>" for each in task.remarks)
    note = _POINTS + (_FRONT if task.fronts[0].front else _NO_FRONT)
    return "\n".join(
        [
            f'<section id="task-{index}"><h2>{escape(task.name)}</h2>{told}',
            result_table(task.lines, task.measures, task.short),
            f'<div class="choose">{few}<button type="button" data-all="1">draw all</button> '
            '<button type="button" data-all="0">draw none</button>',
            '<div class="legend" role="group" aria-label="Settings that are drawn"></div></div>',
            f'<div class="charts results">{_figures(0, results)}</div>',
            f'<p class="soft">{note}{_GOLD if len(task.fronts) > 1 else ""}</p>',
            f'<p class="soft">As pictures: {links(task.pictures)}</p>',
            differences_table(task.lines, task.differences),
            "<details class=more><summary>More: at equal KL, KLs and coefficients, speed, "
            "every run, what differs</summary>",
            equal_table(task.equal),
            f'<h3>More curves</h3><div class="charts">{_figures(results, len(task.charts))}</div>',
            other_numbers(task.lines, task.measures),
            runs_table(task.lines),
            settings_table([line.setting for line in task.lines]),
            "</details></section>",
        ]
    )


def _figures(first: int, end: int) -> str:
    """Empty figures, into which the script draws the charts ``first`` to ``end - 1``."""
    return "".join(
        f'<figure data-chart="{i}"><div class="plot"></div></figure>' for i in range(first, end)
    )
