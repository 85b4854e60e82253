"""The page: one HTML file with data, script and style inside, and nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from klrl.report.charts import SHOWN, Chart, Point
from klrl.report.frontier import EqualKL
from klrl.report.jobs import Job
from klrl.report.measures import Measure
from klrl.report.runs import Found
from klrl.report.summary import Line
from klrl.report.tables import commands, differences, equal_table, jobs_table, summary_table

_HOW = (
    "Final numbers are means over the last tenth of a run's iterations. Values over seeds are "
    "interquartile means with 95 % percentile-bootstrap intervals: with few seeds such intervals "
    "are narrow, so look at the worst seed too. In band: the share of iterations after the tenth "
    "with KL(old||new) within a factor 1.5 of loss.dtarg."
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
    """What the page shows of one task.

    Attributes:
        name: the environment.
        lines: the table, one line per setting.
        measures: its columns.
        curves: the learning curves.
        frontiers: reward against sqrt(KL), and the gold score where there is one.
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


def make_page(tasks: Sequence[Task], jobs: Sequence[Job], found: Found) -> str:
    """The HTML.

    Args:
        tasks: what there is to show.
        jobs: failed, interrupted, running and waiting ones, and repeated ones.
        found: all runs and sweeps, for their commands.
    """
    links = [f'<a href="#task-{i}">{escape(task.name)}</a>' for i, task in enumerate(tasks)]
    links += ['<a href="#jobs">Other jobs</a>', '<a href="#commands">Commands</a>']
    counted = sum(len(line.setting.runs) for task in tasks for line in task.lines)
    versions = sorted({str(run.manifest.get("klrl", "?")) for run in found.runs})
    body = [
        "<h1>klrl report</h1>",
        f"<p>{counted} runs counted of {len(found.runs)}; klrl {', '.join(versions)}; "
        '<a href="summary.csv">summary.csv</a></p>',
        f"<nav>{''.join(links)}</nav>",
        f'<p class="soft">{_HOW}</p>',
        "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>",
        *(_section(i, task) for i, task in enumerate(tasks)),
        jobs_table(jobs, found.skipped),
        commands(found),
        '<div id="tip"></div>',
        f'<script type="application/json" id="data">{_embed([_data(t) for t in tasks])}</script>',
        f"<script>{_file('page.js')}</script>",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>klrl report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_file("page.css")}</style></head>'
    )
    return f"{head}<body>\n" + "\n".join(body) + "\n</body></html>\n"


def _file(name: str) -> str:
    return resources.files("klrl.report").joinpath(name).read_text(encoding="utf-8")


def _embed(data: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
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
    words = {"title": chart.title, "x": chart.x, "y": chart.y, "log": chart.log}
    return {**words, "front": chart.front, "series": series}


def _numbers(point: Point) -> list[float | None]:
    y, across = point.y, point.across
    ends = [_round(across.low), _round(across.high)] if across else []
    return [_round(y.value), _round(y.low), _round(y.high), y.seeds, *ends]


def _round(value: float | None) -> float | None:
    """Seven digits: more than the eye needs, a third of the bytes."""
    return None if value is None else float(f"{value:.7g}")


def _section(index: int, task: Task) -> str:
    few = (
        f"<p>Drawn at first: the {SHOWN} settings with the highest final return.</p>"
        if len(task.shown) < len(task.lines)
        else ""
    )
    count = len(task.frontiers)
    fronts, plots = _figures(0, count), _figures(count, count + len(task.curves))
    pictures = ", ".join(f'<a href="{name}">{name}</a>' for name in task.pictures)
    return "\n".join(
        [
            f'<section id="task-{index}"><h2>{escape(task.name)}</h2>{few}',
            '<button data-all="1">all</button> <button data-all="0">none</button>',
            '<div class="legend"></div>',
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
    """Empty figures for the script to draw the charts of these numbers in."""
    return "".join(
        f'<figure data-chart="{i}"><div class="plot"></div></figure>' for i in range(first, end)
    )
