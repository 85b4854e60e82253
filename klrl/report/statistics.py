"""Computes means, intervals and tests over seeds, as functions of arrays.

Sources: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", for the interquartile mean and P(A > B); Welch 1947 and Satterthwaite 1946 for intervals
of means; Holm 1979 for adjusted p. docs/report.md has the intervals' coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

#: With fewer seeds, the report shows points and their range, but no interval, test or P(A > B).
ENOUGH = 5
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean over runs with different seeds, with its interval and the runs' range."""

    value: float
    low: float | None  # lower end of the mean's 95 % interval; None with fewer than ENOUGH seeds
    high: float | None
    seeds: int
    iqm: float
    least: float
    most: float
    error: float | None = None  # standard error of the mean; None with one seed


@dataclass(frozen=True)
class Contrast:
    """The estimate of a weighted sum of means, such as a difference or a mean over tasks."""

    value: float
    low: float
    high: float
    p: float  # two-sided, of the hypothesis that the true sum is 0


#: Independent samples, each of two or more values; and the weights of their means.
Weighted = tuple[Sequence[Array], Sequence[float]]


def welch(samples: Sequence[Array], weights: Sequence[float]) -> Contrast:
    """Estimate sum_j w_j mean(x_j) and its interval, from independent samples x_j.

    Sample x_j has n_j >= 2 values of variance s_j^2. With v_j = w_j^2 s_j^2 / n_j, se^2 = sum_j v_j
    has se^4 / sum_j(v_j^2 / (n_j - 1)) degrees of freedom (Welch, Satterthwaite). The interval is
    exact for one normal sample, else approximate. It ignores rare bad values that no sample has.
    """
    return welch_all([(samples, weights)])[0]


def welch_all(sums: Sequence[Weighted]) -> list[Contrast]:
    """Apply :func:`welch` to many sums at once, vectorised."""
    if not sums:
        return []
    value, error, df = np.array([_moments(*each) for each in sums]).T
    reach = quantile(LEVEL, df) * error
    # Without spread, every nonzero difference has p = 0.
    t = np.divide(value, error, out=np.where(value == 0, 0.0, np.inf), where=error > 0)
    columns = np.stack([value, value - reach, value + reach, two_sided(t, df)])
    return [Contrast(*each) for each in columns.T.tolist()]


@np.errstate(over="ignore")  # rows may contain 1e308
def _moments(samples: Sequence[Array], weights: Sequence[float]) -> tuple[float, float, float]:
    """Return value, standard error and degrees of freedom of a weighted sum of means."""
    # In units of a power of 2 nothing is rounded, and no square overflows.
    unit = int(np.frexp(max(float(np.abs(x).max()) for x in samples))[1])
    samples = [np.ldexp(x, -unit) for x in samples]
    value = sum(w * float(x.mean()) for w, x in zip(weights, samples, strict=True))
    parts = [w**2 * float(x.var(ddof=1)) / len(x) for w, x in zip(weights, samples, strict=True)]
    variance = sum(parts)
    # Standard errors and values up to this size are rounding errors, and count as 0.
    least = 1e-13 * max(float(np.abs(w * x).max()) for w, x in zip(weights, samples, strict=True))
    if variance <= least**2:
        return float(np.ldexp(0.0 if abs(value) <= least else value, unit)), 0.0, 1.0
    df = variance**2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, samples, strict=True))
    return float(np.ldexp(value, unit)), float(np.ldexp(math.sqrt(variance), unit)), df


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p of several tests to bound the probability of any false positive (Holm 1979).

    Multiplies the i-th smallest of m p-values by m - i + 1; takes the running maximum, at most 1.
    """
    order = np.argsort(p, kind="stable")
    factors = len(p) - np.arange(len(p))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p)[order] * factors))
    return [float(each) for each in adjusted]


def chance_of_more(a: Array, b: Array) -> float:
    """Estimate P(A > B) as rliable does: Mann-Whitney's U / (n m), where ties count half."""
    return float(((a[:, None] > b).mean() + (a[:, None] >= b).mean()) / 2)


def iqm(values: Array) -> Array:
    """Compute the mean over axis 0 without the floor(n / 4) smallest and largest of n values."""
    cut = len(values) // 4
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


@cache
def _reach(n: int) -> float:
    """Return half the width of the interval of a mean over n seeds, in standard errors."""
    return float(quantile(LEVEL, n - 1))


@np.errstate(over="ignore")  # rows may contain 1e308
def estimate(values: Array) -> Estimate | None:
    """Estimate the mean over seeds, ignoring NaNs; None if all are NaN."""
    x = np.asarray(values, float)
    x = x[np.isfinite(x)]
    n = len(x)
    if not n:
        return None
    least, most = float(x.min()), float(x.max())
    mean, middle = (float(np.clip(each, least, most)) for each in (x.mean(), iqm(x)))
    # The standard error of equal numbers is 0, apart from rounding errors.
    error = float(x.std(ddof=1)) / math.sqrt(n) if least < most else 0.0
    reach = _reach(n) * error if n >= ENOUGH else math.nan
    low, high = (None, None) if math.isnan(reach) else (mean - reach, mean + reach)
    return Estimate(mean, low, high, n, middle, least, most, error if n > 1 else None)


def estimate_curve(values: Array) -> list[Estimate | None]:
    """Apply :func:`estimate` to each point of a curve, [seeds, points]."""
    return [estimate(each) for each in values.T]


# ------------------------------------------------------------------------------------- Student's t

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)
_lgamma = np.vectorize(math.lgamma, otypes=[float])


def two_sided(t: ArrayLike, df: ArrayLike) -> Array:
    """Compute P(|T| >= |t|) of Student's t, to an absolute error of 1e-14.

    Substituting T = sqrt(df) tan(x) gives 1 - 2 sqrt(df) f(0) I, where f is the density of T, and I
    the integral of cos(x)^(df - 1) from 0 to atan(|t| / sqrt(df)). ``df`` >= 1 may be fractional,
    and ``t`` infinite.
    """
    t, df = np.broadcast_arrays(np.asarray(t, float), np.asarray(df, float))
    half = np.arctan(np.abs(t) / np.sqrt(df)) / 2
    inside = half * (np.cos(half[..., None] * (_NODES + 1)) ** (df[..., None] - 1) @ _WEIGHTS)
    outside = 1 - 2 * np.sqrt(df) * density(np.zeros_like(df), df) * inside
    return np.where(np.isinf(t), 0.0, np.maximum(outside, 0.0))


def quantile(level: float, df: ArrayLike) -> Array:
    """Return t with P(|T| <= t) = level: half the width of an interval, in standard errors."""
    df = np.asarray(df, float)
    t = np.ones_like(df)
    while (short := two_sided(2 * t, df) > 1 - level).any():
        t = np.where(short, 2 * t, t)
    # P(|T| >= t) is convex in t > 0: Newton's steps from below the root stay below, and converge.
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
