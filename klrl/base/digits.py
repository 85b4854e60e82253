"""Formats numbers for people: a mean gets as many digits as its standard error allows."""

from __future__ import annotations

import math

#: Significant digits of a mean in a table; one less if its error is a tenth of the mean or more.
_SIGNIFICANT = 3
#: Above this many decimal places, a number is written with significant digits, as 1.2e-07.
_MOST_DECIMALS = 5


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """Format a number with ``digits`` significant digits (0: as a whole number); zero has no sign.

    Large numbers are written in full: 1.2346e+05 is hard to read.
    """
    plus = "+" if signed else ""
    in_full = digits == 0 or 10**digits - 0.5 <= abs(value) < 1e12
    text = f"{value:{plus},.0f}" if in_full else f"{value:{plus}.{digits}g}"
    return "0" if text in ("-0", "+0") else text


def mean_and_error(value: float, error: float | None, digits: int) -> str:
    """A mean and its standard error, rounded to the second digit of the error: ``-152.7 +- 9.9``.

    ``digits``: significant digits of the mean if its error is unknown (None), not finite, below
    1e-4 or mere rounding noise.
    """
    if error is None:
        return number(value, digits)
    decimals = None
    if _usable(error, value):
        # Round the error first: 9.96 becomes 10, whose second digit is the unit.
        decimals = 1 - int(f"{error:.1e}".partition("e")[2])
    if decimals is None or decimals > _MOST_DECIMALS:
        return f"{number(value, digits)} +- {number(error, 2)}"
    return " +- ".join(_fixed(each, decimals) for each in (value, error))


def places(value: float, error: float | None) -> int | None:
    """Decimal places of a mean, negative for tens and hundreds; None without a usable error.

    Keeps three digits of the larger of mean and error; two if the error >= a tenth of the mean.
    """
    if not error or not _usable(error, value):
        return None
    size = max(abs(value), error)
    digits = _SIGNIFICANT if error < abs(value) / 10 else _SIGNIFICANT - 1
    return digits - 1 - math.floor(math.log10(size))


def _usable(error: float, value: float) -> bool:
    """Whether a mean can be rounded to an error that is neither zero nor mere rounding noise."""
    return math.isfinite(error) and error > 0 and error >= 1e-12 * abs(value)


def show(value: float, decimals: int | None, *, signed: bool = False) -> str:
    """Format a number with ``decimals`` places: 4742.3 with -1 is ``4,740``. None: 3 digits."""
    if decimals is None or decimals > _MOST_DECIMALS:
        return number(value, _SIGNIFICANT, signed=signed)
    return _fixed(value, decimals, signed=signed)


def span(low: float, high: float, decimals: int | None) -> str:
    """``95 to 112``."""
    return f"{show(low, decimals)} to {show(high, decimals)}"


def _fixed(value: float, decimals: int, *, signed: bool = False) -> str:
    text = f"{round(value, decimals):{'+' if signed else ''},.{max(decimals, 0)}f}"
    return text.lstrip("+-") if not text.strip("+-0.,") else text  # zero without a sign
