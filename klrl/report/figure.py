"""Draws one metric of many runs as a figure for a paper, for ``klrl figure`` and ``Sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure, SubFigure

from klrl.base.errors import ConfigError
from klrl.base.files import replacing
from klrl.base.text import nearest
from klrl.report.measures import column, curve, final, recorded_metrics, reward_metric
from klrl.report.pictures import LOOK, draw_curves, draw_point, label, look_of
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting, by_task
from klrl.runs.curves import shown
from klrl.runs.metrics import PANELS, heading, metric_of

_LOOK = {
    **LOOK,
    **{"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "legend.frameon": False},
    **{"figure.constrained_layout.use": True, "svg.hashsalt": "klrl"},
}
#: End of a file's name -> dates in such a file, left out so that equal runs give equal files.
_FORMATS = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


def draw_figure(
    settings: Sequence[Setting],
    y: str | None = None,
    x: str | None = None,
    *,
    width: float = 3.3,
    smooth: int = 1,
    out: str | Path | None = None,
) -> Figure:
    """Draw a metric of each setting: the mean over seeds, its interval, and the seeds.

    Args:
        settings: the settings; each task has its own axes.
        y: the metric; None: the return.
        x: frames or samples (None), or ``iteration``: draw curves. Any other metric: draw a point
            per setting, at the means over the last tenth of the iterations.
        width: in inches; 3.3 is a column.
        smooth: the number of a run's latest values whose mean a curve shows.
        out: a file to write: PDF, SVG or PNG.

    Raises:
        ConfigError: no run counts, none has recorded a metric, an option is wrong, or
            ``out`` cannot be written.
    """
    file = None if out is None else Path(out)
    runs = [run for setting in settings for run in setting.runs]
    if not runs:
        raise ConfigError("no run to draw; --unfinished counts runs that did not finish")
    known = recorded_metrics(runs)
    for key, name in (("x", x), ("y", y)):
        if name not in (None, *known):
            raise ConfigError(f"{key}={name}: no run has this metric{nearest(str(name), known)}")
    if not 1 <= width <= 50:
        raise ConfigError(f"width={width:g}: give 1 to 50 inches")
    if smooth < 1:
        raise ConfigError(f"smooth={smooth}: give 1 or more")
    if file and file.suffix not in _FORMATS:
        raise ConfigError(f"out={out}: give a file that ends with {', '.join(_FORMATS)}")
    tasks = by_task(settings)
    most = max(map(len, tasks.values()))
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(width, 0.68 * width / len(tasks) + 0.16 * most))
        parts = figure.subfigures(1, len(tasks), squeeze=False)[0]
        for part, (task, of) in zip(parts, tasks.items(), strict=True):
            metric = y or reward_metric([run for setting in of for run in setting.runs])
            _draw_task(part, of, x or of[0].runs[0].axis, metric, smooth)
            part.axes[0].set_title(task if len(tasks) > 1 else "")
        if file:
            _write(figure, file)
    return shown(figure)


def _write(figure: Figure, out: Path) -> None:
    try:
        with replacing(out) as partial:
            figure.savefig(partial, dpi=300, metadata=_FORMATS[out.suffix])
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"out={out}: {why}; give a file in a folder that can be written"
        ) from error


def _draw_task(figure: SubFigure, settings: Sequence[Setting], x: str, y: str, smooth: int) -> None:
    """Draw the settings of a task, label the axes, and list the settings below."""
    axes: Any = figure.subplots()
    domain = settings[0].runs[0].domain
    panel, over_time = PANELS.get(str(metric_of(y, domain).panel)), x in (domain.axis, "iteration")
    for i, setting in enumerate(settings):
        colour, dashes, shape, _ = look_of(i)
        look = {"dashes": dashes} if over_time else {"marker": shape, "linestyle": ""}
        axes.plot([], [], color=colour, label=setting.name, **look)
        if not over_time:
            at = [np.array([final(run, name) for run in setting.runs]) for name in (x, y)]
            draw_point(axes, setting, i, at, filled=True)
    label(axes, "", "")
    if over_time:
        runs = [[_drawn(run, x, y, smooth) for run in setting.runs] for setting in settings]
        drawn = [replace(each, runs=of) for each, of in zip(settings, runs, strict=True)]
        curves = {i: curve(each, y) for i, each in enumerate(drawn)}
        draw_curves(axes, drawn, curves, "first", log=panel is not None and panel.log)
    # The y-axis may be shorter than title and unit in one line.
    for write, name, break_ in ((axes.set_xlabel, x, " "), (axes.set_ylabel, y, "\n")):
        metric = metric_of(name, domain)
        write(heading(metric.title) + f"{break_}({metric.unit})" * bool(metric.unit))
    if len(settings) > 1:
        figure.legend(loc="outside lower left")


def _drawn(run: ReadRun, x: str, y: str, smooth: int) -> ReadRun:
    """Return a run with another x-axis, and with means of the latest ``smooth`` values."""
    values = column(run, y).copy()
    recorded = np.isfinite(values)
    known = values[recorded]
    values[recorded] = [known[max(i - smooth, 0) : i].mean() for i in range(1, len(known) + 1)]
    columns = {**run.columns, y: values}
    return replace(run, domain=replace(run.domain, axis=x), columns=columns)
