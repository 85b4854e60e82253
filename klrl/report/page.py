"""The page: one self-contained HTML file with data, script and style."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from klrl.report.charts import SHOWN, Chart, Point
from klrl.report.frontier import EqualKL
from klrl.report.measures import Line, Measure
from klrl.report.runs import Inventory
from klrl.report.settings import Job, count
from klrl.report.tables import (
    commands,
    differences,
    equal_table,
    jobs_table,
    metrics_table,
    summary_table,
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
        "interquartile mean with its 95 % percentile-bootstrap interval. With few seeds it is too "
        "narrow, so check the worst seed too; with one seed there is none",
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
_FRONT = (
    "One point per setting, with the intervals of reward and KL over seeds. Filled and joined: the "
    "Pareto front, which no setting beats in both."
)
_GOLD = (
    " The reward is a proxy of the gold score: where the gold score falls while the KL grows and "
    "the reward rises, the reward is over-optimised."
)


@dataclass(frozen=True)
class Task:
    """The page's section of one task.

    Attributes:
        name: the environment.
        lines: the table, one line per setting.
        measures: the table's columns.
        curves: the learning curves.
        frontiers: reward against sqrt(KL), and the gold score if there is one.
        equal: reward at equal KL.
        shown: indices of the settings that are drawn at first.
        pictures: names of the PNG files beside the page.
    """

    name: str
    lines: list[Line]
    measures: list[Measure]
    curves: list[Chart]
    frontiers: list[Chart]
    equal: EqualKL
    shown: list[int]
    pictures: list[str]


def make_page(tasks: Sequence[Task], jobs: Sequence[Job], inventory: Inventory) -> str:
    """The page's HTML.

    Args:
        tasks: one section each.
        jobs: those that are failed, interrupted, running, waiting or repeated.
        inventory: all runs and sweeps, for their commands.
    """
    scripts, style = [_file("chart.js"), _file("page.js")], _file("page.css")
    links = [f'<a href="#task-{i}">{escape(task.name)}</a>' for i, task in enumerate(tasks)]
    links += [
        f'<a href="#{part.lower().split()[-1]}">{part}</a>'
        for part in ("Other jobs", "Metrics", "Commands")
    ]
    counted = sum(len(line.setting.runs) for task in tasks for line in task.lines)
    runs = f"{count(counted, 'run')} counted of {len(inventory.runs)}"
    versions = sorted({str(run.manifest.get("klrl", "?")) for run in inventory.runs}) or ["?"]
    body = [
        "<h1>klrl report</h1>",
        f'<p>{runs}; klrl {escape(", ".join(versions))}; <a href="summary.csv">summary.csv</a></p>',
        f'<nav aria-label="Parts">{"".join(links)}</nav>',
        _reading(),
        "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>",
        "" if tasks else _nothing(jobs),
        *(_section(i, task) for i, task in enumerate(tasks)),
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


def _reading() -> str:
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in _READING)
    return f"<details><summary>How to read this page</summary><dl>{rows}</dl></details>"


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
    return {
        "settings": [line.setting.name for line in task.lines],
        "shown": task.shown,
        "charts": [_chart_data(chart) for chart in (*task.frontiers, *task.curves)],
    }


def _chart_data(chart: Chart) -> dict[str, Any]:
    series = [
        {"i": i, "points": [[_round(point.x), *_numbers(point)] for point in points]}
        for i, points in chart.series.items()
    ]
    labels = {"title": chart.title, "x": chart.x, "y": chart.y, "digits": chart.digits}
    return {
        **labels,
        "log": chart.log,
        "floor": chart.floor,
        "front": chart.front,
        "series": series,
    }


def _numbers(point: Point) -> list[float | None]:
    y, across = point.y, point.across
    ends = [_round(across.low), _round(across.high)] if across else []
    return [_round(y.value), _round(y.low), _round(y.high), y.seeds, *ends]


def _round(value: float | None) -> float | None:
    """Seven digits: more than a chart shows, in a third of the bytes."""
    return None if value is None else float(f"{value:.7g}")


def _section(index: int, task: Task) -> str:
    few = (
        f"<p>Drawn at first: the {SHOWN} settings with the highest final return.</p>"
        if len(task.shown) < len(task.lines)
        else ""
    )
    count = len(task.frontiers)
    fronts, plots = _figures(0, count), _figures(count, count + len(task.curves))
    pictures = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in task.pictures)
    return "\n".join(
        [
            f'<section id="task-{index}"><h2>{escape(task.name)}</h2>{few}',
            '<button type="button" data-all="1">draw all</button> '
            '<button type="button" data-all="0">draw none</button>',
            '<div class="legend" role="group" aria-label="Settings that are drawn"></div>',
            f'<h3>Reward against KL</h3><div class="charts fronts">{fronts}</div>',
            f'<p class="soft">{_FRONT}{_GOLD if count > 1 else ""}</p>',
            equal_table(task.equal),
            f'<h3>Learning curves</h3><div class="charts">{plots}</div>'
            '<p class="soft">Line: interquartile mean over seeds; band: its 95 % interval. '
            f"As pictures: {pictures}</p>",
            summary_table(task.lines, task.measures),
            differences([line.setting for line in task.lines]),
            "</section>",
        ]
    )


def _figures(first: int, end: int) -> str:
    """Empty figures, into which the script draws the charts ``first`` to ``end - 1``."""
    return "".join(
        f'<figure data-chart="{i}"><div class="plot"></div></figure>' for i in range(first, end)
    )
