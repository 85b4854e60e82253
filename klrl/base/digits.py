"""Formats numbers for people. The digits of a mean depend on its standard error."""

from __future__ import annotations

import math

#: Significant digits of a mean in a table.
_SIGNIFICANT = 3
#: A number that needs more decimal places than this is shown with significant digits: 1.2e-07.
_MOST_DECIMALS = 5


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """Format a number with ``digits`` significant digits; 0 digits give a whole number.

    Numbers from ``10**digits`` to 1e12 are written in full. Zero has no sign.
    """
    plus = "+" if signed else ""
    in_full = digits == 0 or 10**digits - 0.5 <= abs(value) < 1e12
    text = f"{value:{plus},.0f}" if in_full else f"{value:{plus}.{digits}g}"
    return "0" if text in ("-0", "+0") else text


def mean_and_error(value: float, error: float | None, digits: int) -> str:
    """Format a mean and its standard error, which gets two digits: ``-152.7 +- 9.9``.

    If the error is None, not finite, below 1e-4 or rounding noise (shown as 0), the mean gets
    ``digits`` significant digits. Otherwise both get the same decimal places.
    """
    if error is None:
        return number(value, digits)
    if math.isfinite(value) and math.isfinite(error) and not _usable(error, value):
        error = 0.0
    decimals = None
    if _usable(error, value):
        # Count the decimals of the rounded error: 9.96 rounds to 10, which has none.
        decimals = 1 - int(f"{error:.1e}".partition("e")[2])
    if decimals is None or decimals > _MOST_DECIMALS:
        return f"{number(value, digits)} +- {number(error, 2)}"
    return " +- ".join(_fixed(each, decimals) for each in (value, error))


def places(value: float, error: float | None) -> int | None:
    """Return the decimal places of a mean (-1 rounds to tens); None if :func:`_usable` is False.

    The larger of mean and error gets three digits, or two if the error is at least a tenth of the
    mean.
    """
    if not error or not _usable(error, value):
        return None
    size = max(abs(value), error)
    digits = _SIGNIFICANT if error < abs(value) / 10 else _SIGNIFICANT - 1
    return digits - 1 - math.floor(math.log10(size))


def _usable(error: float, value: float) -> bool:
    """Return whether an error is finite, positive and above rounding noise."""
    return math.isfinite(error) and error > 0 and error >= 1e-12 * abs(value)


def show(value: float, decimals: int | None, *, signed: bool = False) -> str:
    """Format a number with ``decimals`` places; -1 rounds to tens. None: 3 significant digits."""
    if decimals is None or decimals > _MOST_DECIMALS:
        return number(value, _SIGNIFICANT, signed=signed)
    return _fixed(value, decimals, signed=signed)


def span(low: float, high: float, decimals: int | None) -> str:
    """Format an interval, as ``95 to 112``."""
    return f"{show(low, decimals)} to {show(high, decimals)}"


def _fixed(value: float, decimals: int, *, signed: bool = False) -> str:
    text = f"{round(value, decimals):{'+' if signed else ''},.{max(decimals, 0)}f}"
    return text.lstrip("+-") if not text.strip("+-0.,") else text  # zero without a sign
