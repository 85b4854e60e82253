"""How a mean is printed: two or three significant digits, as many as its standard error allows."""

from __future__ import annotations

import math

from klrl.report.statistics import Estimate
from klrl.runs.metrics import number

_MOST = 3


def places(value: float, error: float | None) -> int | None:
    """Decimal places of a mean, negative for tens and hundreds; None where no error limits them.

    Three digits of the larger of mean and error; two if the error is a tenth of the mean or more.
    """
    # The error of equal seeds may be rounding.
    if not error or error < 1e-12 * abs(value) or not math.isfinite(value):
        return None
    size = max(abs(value), error)
    digits = _MOST if error < abs(value) / 10 else _MOST - 1
    return digits - 1 - math.floor(math.log10(size))


def show(value: float, decimals: int | None, *, signed: bool = False) -> str:
    """A number with so many places, as ``4,740`` for 4742.3 and -1; None: three digits."""
    if decimals is None or decimals > 5:
        return number(value, _MOST, signed=signed)
    text = f"{round(value, decimals):{'+' if signed else ''},.{max(decimals, 0)}f}"
    return text.lstrip("+-") if not text.strip("+-0.,") else text


def show_estimate(value: Estimate) -> tuple[str, str]:
    """What comes first, and the smaller print below it.

    The mean and its interval; below five seeds the range and the mean, and no interval.
    """
    decimals = places(value.value, value.error)
    mean = show(value.value, decimals)
    # No interval with one seed, or where all seeds agree, as on a fixed coefficient.
    if value.least == value.most:
        return mean, ""
    if value.low is None or value.high is None:
        return span(value.least, value.most, decimals), f"mean {mean}"
    return mean, span(value.low, value.high, decimals)


def span(low: float, high: float, decimals: int | None) -> str:
    """``95 to 112``."""
    return f"{show(low, decimals)} to {show(high, decimals)}"
