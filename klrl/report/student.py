"""Student's t distribution for arrays, by the regularised incomplete beta function."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

_TINY = 1e-300
#: Terms of the continued fraction; it needs about the root of the larger parameter.
_TERMS = 1000
_lgamma = np.vectorize(math.lgamma, otypes=[float])


def two_sided(t: ArrayLike, df: ArrayLike) -> Array:
    """P(|T| >= |t|) of Student's t: I_x(df / 2, 1 / 2) at x = df / (df + t^2).

    Degrees of freedom > 0 need not be whole; t may be infinite.
    """
    t, df = np.broadcast_arrays(np.asarray(t, float), np.asarray(df, float))
    with np.errstate(over="ignore", invalid="ignore"):
        rest = np.where(np.isinf(t), 1.0, t**2 / (df + t**2))
        x = np.where(np.isinf(t), 0.0, df / (df + t**2))
    return incomplete_beta(df / 2, np.full_like(df, 0.5), x, rest)


def quantile(level: float, df: ArrayLike) -> Array:
    """The t with P(|T| <= t) = level: half the width of an interval, in standard errors."""
    df = np.asarray(df, float)
    t = np.ones_like(df)
    while (short := two_sided(2 * t, df) > 1 - level).any():
        t = np.where(short, 2 * t, t)
    # P(|T| >= t) is convex in t > 0, so that Newton's steps from below stay below, and converge.
    for _ in range(60):
        step = (two_sided(t, df) - (1 - level)) / (2 * density(t, df))
        t = t + step
        if (np.abs(step) <= 1e-15 * t).all():
            break
    return t


def density(t: Array, df: Array) -> Array:
    """Student's density, Gamma((df+1)/2) / (sqrt(df pi) Gamma(df/2)) (1 + t^2/df)^(-(df+1)/2)."""
    front = _lgamma((df + 1) / 2) - _lgamma(df / 2) - np.log(df * np.pi) / 2
    return np.exp(front - (df + 1) / 2 * np.log1p(t**2 / df))


def incomplete_beta(a: Array, b: Array, x: Array, rest: Array) -> Array:
    """The regularised incomplete beta function I_x(a, b), all of one shape.

    The continued fraction DLMF 8.17.22 converges fast for x < (a + 1) / (a + b + 2); elsewhere
    I_x(a, b) = 1 - I_{1-x}(b, a). ``rest`` is 1 - x, which may be far smaller than x's rounding.
    """
    turned = x > (a + 1) / (a + b + 2)
    a, b = np.where(turned, b, a), np.where(turned, a, b)
    x, rest = np.where(turned, rest, x), np.where(turned, x, rest)
    with np.errstate(divide="ignore"):
        log_front = a * np.log(x) + b * np.log(rest) + _lgamma(a + b) - _lgamma(a) - _lgamma(b)
    value = np.exp(log_front) / (a * _fraction(a, b, x))
    return np.where(turned, 1 - value, value)


def _fraction(a: Array, b: Array, x: Array) -> Array:
    """1 + d_1 / (1 + d_2 / (1 + ...)), by Lentz's method.

    d_2m = m (b - m) x / ((a + 2m - 1)(a + 2m)),
    d_2m+1 = -(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1)).
    """
    value, above, below = np.ones_like(x), np.ones_like(x), np.zeros_like(x)
    for k in range(1, _TERMS):
        m = k // 2
        if k % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / _nonzero(1 + d * below)
        above = _nonzero(1 + d / above)
        value = value * (change := above * below)
        if (np.abs(change - 1) < 4e-16).all():
            break
    return value


def _nonzero(values: Array) -> Array:
    return np.where(np.abs(values) < _TINY, _TINY, values)
