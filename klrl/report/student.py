"""Student's t distribution for arrays, by quadrature."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)
_lgamma = np.vectorize(math.lgamma, otypes=[float])


def two_sided(t: ArrayLike, df: ArrayLike) -> Array:
    """P(|T| >= |t|) of Student's t; to 1e-14, not relative to itself.

    With T = sqrt(df) tan(x) this is 1 - 2 sqrt(df) f(0) times the integral of cos(x)^(df - 1) from
    0 to atan(|t| / sqrt(df)), f the density. Degrees of freedom >= 1 need not be whole; t may be
    infinite.
    """
    t, df = np.broadcast_arrays(np.asarray(t, float), np.asarray(df, float))
    half = np.arctan(np.abs(t) / np.sqrt(df)) / 2
    inside = half * (np.cos(half[..., None] * (_NODES + 1)) ** (df[..., None] - 1) @ _WEIGHTS)
    outside = 1 - 2 * np.sqrt(df) * density(np.zeros_like(df), df) * inside
    return np.where(np.isinf(t), 0.0, np.maximum(outside, 0.0))


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
