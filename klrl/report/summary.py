"""The summary table: each setting's estimate of every measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from klrl.report.measures import measures
from klrl.report.settings import Setting
from klrl.report.statistics import Estimate, estimate


@dataclass(frozen=True)
class Line:
    """One setting's row of the table.

    Attributes:
        setting: the setting.
        estimates: by :attr:`Measure.key`; None if no seed has the number.
        worst: the lowest final return among its seeds.
    """

    setting: Setting
    estimates: dict[str, Estimate | None]
    worst: float | None


def table(settings: Sequence[Setting]) -> list[Line]:
    """One line per setting of one task."""
    columns = measures([run for setting in settings for run in setting.runs])
    lines = []
    for setting in settings:
        values = {m.key: np.array([m.of(run) for run in setting.runs]) for m in columns}
        returns = values["return"][np.isfinite(values["return"])]
        worst = float(returns.min()) if len(returns) else None
        lines.append(Line(setting, {k: estimate(v) for k, v in values.items()}, worst))
    return lines


def line_value(line: Line, key: str) -> float:
    """The estimate's value; NaN if there is none."""
    estimated = line.estimates[key]
    return estimated.value if estimated else float("nan")
