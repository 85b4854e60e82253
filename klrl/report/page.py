"""Makes the page: one self-contained HTML file with charts, tables, script and style."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from klrl.base.text import counted, escaped_lines
from klrl.domains import Domain
from klrl.report import tables
from klrl.report.charts import Chart
from klrl.report.differences import ALL_PAIRS, Difference, over_tasks
from klrl.report.equal_kl import KNOBS, equal_kl
from klrl.report.measures import Line, Measure, measures
from klrl.report.outcomes import remarks, short_runs
from klrl.report.pictures import Drawing, boxes
from klrl.report.runs import Inventory
from klrl.report.settings import LeftOut, Setting, count_states
from klrl.report.statistics import ENOUGH
from klrl.runs.metrics import heading


@dataclass(frozen=True)
class TaskSection:
    """The page's section of one task."""

    name: str
    lines: list[Line]
    charts: list[tuple[Chart, Drawing]]  # return against KL, then learning curves, scores first
    shown: list[int]  # indices of the settings that are drawn at first
    pictures: list[str]  # names of the picture files
    differences: list[Difference]

    @property
    def settings(self) -> list[Setting]:
        """The task's settings."""
        return [line.setting for line in self.lines]

    @property
    def measures(self) -> list[Measure]:
        """The measures that at least one setting has."""
        every = measures([run for setting in self.settings for run in setting.runs])
        return [each for each in every if any(line.estimates[each.key] for line in self.lines)]

    @property
    def domain(self) -> Domain:
        """The task's domain: control or language."""
        return self.settings[0].runs[0].domain


#: Functions that the template calls by name.
_CALLED = (boxes, equal_kl, remarks, short_runs, count_states, heading)


def make_page(tasks: Sequence[TaskSection], jobs: Sequence[LeftOut], inventory: Inventory) -> str:
    """Make the page's HTML; the template escapes all text that was read from a folder."""
    script, style = _file("page.js"), _file("page.css")
    drawings = [drawing for task in tasks for _, drawing in task.charts]
    number = sum(len(line.setting.runs) for task in tasks for line in task.lines)
    left_out = [job for job in jobs if not job.counted]
    runs = f"{counted(number, 'run')} counted of {len(inventory.runs)}"
    versions = sorted({str(run.manifest.get("klrl", "?")) for run in inventory.runs}) or ["?"]
    commands = [each.commands[-1] for each in inventory.sweeps]
    commands += [each.command for each in inventory.runs]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_file("page.html")).render(
        policy=_policy(script, style),
        style=style,
        script=script,
        # Escape the JSON, so that it cannot end the script element around it.
        data=htmlsafe_json_dumps(
            {each.key: each.data for each in drawings}, separators=(",", ":"), allow_nan=False
        ),
        tables=tables,
        **{each.__name__: each for each in _CALLED},
        tasks=tasks,
        over=over_tasks({task.name: task.lines for task in tasks}) if len(tasks) > 1 else None,
        jobs=jobs,
        begun=any(job.iterations not in ("", "0") for job in jobs),
        skipped=inventory.skipped,
        runs=[run for run in inventory.runs if run.rows],
        counted=runs + f" ({count_states(left_out)})" * bool(left_out),
        versions=", ".join(versions),
        commands=dict.fromkeys(filter(None, commands)),
        enough=ENOUGH,
        all_pairs=ALL_PAIRS,
        knobs=" or ".join(KNOBS),
    )
    return escaped_lines(page)


def _file(name: str) -> Markup:
    return Markup(resources.files("klrl.report").joinpath(name).read_text(encoding="utf-8"))


def _policy(script: str, style: str) -> Markup:
    """Make the content security policy: allow only this script, this style, and inline images."""
    # https://www.w3.org/TR/CSP3/#grammardef-hash-source
    digests = (hashlib.sha256(each.encode()).digest() for each in (script, style))
    of_script, of_style = (f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    return Markup(
        f"default-src 'none'; script-src {of_script}; style-src {of_style}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
