"""Intervals, tests and P(A > B) against mpmath, rliable and counts by hand."""

import itertools

import mpmath
import numpy as np
import pytest

from klrl.report.statistics import (
    chance_of_more,
    estimate,
    estimate_curve,
    holm,
    iqm,
    quantile,
    two_sided,
    welch,
    welch_all,
)

rng = np.random.default_rng(3)


def tail(t, df):
    """P(|T| >= t) by integrating the density in 30 digits."""
    with mpmath.workdps(30):
        t, df = mpmath.mpf(t), mpmath.mpf(df)
        front = mpmath.gamma((df + 1) / 2) / mpmath.sqrt(df * mpmath.pi) / mpmath.gamma(df / 2)
        inside = mpmath.quad(lambda x: (1 + x * x / df) ** (-(df + 1) / 2), [0, t / 2, t])
        return float(1 - 2 * front * inside)


@pytest.mark.parametrize("df", [1, 1.37, 2, 4, 7.9, 30, 250])
@pytest.mark.parametrize("t", [1e-3, 0.5, 1, 2.3, 6])
def test_student_against_the_integral_of_its_density(t, df):
    assert float(two_sided(t, df)) == pytest.approx(tail(t, df), abs=1e-11)
    assert float(two_sided(-t, df)) == float(two_sided(t, df))


def test_student_in_closed_form_and_at_its_ends():
    # df = 1: 1 - 2 atan(t) / pi; df = 2: 1 - t / sqrt(2 + t^2).
    t = np.array([0.1, 1.0, 5.0, 1e3])
    np.testing.assert_allclose(two_sided(t, 1), 1 - 2 / np.pi * np.arctan(t), rtol=0, atol=2e-15)
    np.testing.assert_allclose(two_sided(t, 2), 1 - t / np.sqrt(2 + t**2), atol=1e-15)
    assert two_sided([0.0, np.inf, -np.inf], 3).tolist() == [1, 0, 0]


def test_quantiles_are_those_of_printed_tables():
    # NIST/SEMATECH e-Handbook 1.3.6.7.2, two-sided .95 and .99.
    table = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 9: (2.262, 3.250)}
    for df, printed in table.items():
        assert [round(float(quantile(p, df)), 3) for p in (0.95, 0.99)] == list(printed)
    t = quantile(0.95, np.array([1.0, 2.5, 30.0]))
    np.testing.assert_allclose(two_sided(t, [1, 2.5, 30]), 0.05, rtol=1e-13)


def by_hand(a, b, level=0.95):
    """Welch's interval and p by sums in mpmath and its incomplete beta."""
    with mpmath.workdps(30):

        def moments(x):
            mean = mpmath.fsum(map(mpmath.mpf, x)) / len(x)
            return mean, mpmath.fsum((mpmath.mpf(v) - mean) ** 2 for v in x) / (len(x) - 1) / len(x)

        (mean_a, of_a), (mean_b, of_b) = moments(a), moments(b)
        value, variance = mean_a - mean_b, of_a + of_b
        df = variance**2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))

        def two(t):
            return mpmath.betainc(df / 2, mpmath.mpf(1) / 2, 0, df / (df + t * t), regularized=True)

        reach = mpmath.findroot(lambda t: two(t) - (1 - mpmath.mpf(str(level))), 2.5)
        half = reach * mpmath.sqrt(variance)
        p = two(abs(value) / mpmath.sqrt(variance))
        return [float(each) for each in (value, value - half, value + half, p)]


@pytest.mark.parametrize("n, m", [(5, 5), (5, 8), (10, 3)])
def test_a_difference_is_welchs_to_1e_9(n, m):
    a, b = 3 * rng.standard_normal(n) + 2, rng.standard_normal(m)
    made = welch([a, b], [1.0, -1.0])
    np.testing.assert_allclose(
        [made.value, made.low, made.high, made.p], by_hand(a.tolist(), b.tolist()), rtol=1e-9
    )


def test_one_mean_is_students_interval():
    # Student 1908: extra hours of sleep of ten patients, mean 1.58, sd 1.23; t = 4.06.
    hours = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    made = estimate(hours)
    assert made.value == pytest.approx(1.58)
    # R: t.test(extra ~ ..., paired) prints 0.7001142 2.4598858 and p = 0.002833.
    assert (made.low, made.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert welch([hours], [1.0]).p == pytest.approx(0.002833, abs=5e-7)


def test_a_mean_over_tasks_pools_the_spreads_of_the_tasks():
    # One of two tasks without spread: half of the other's interval, with its 4 degrees.
    first, flat = np.array([1.0, 2, 3, 4, 6]), np.full(5, 7.0)
    alone, both = welch([first], [1.0]), welch([first, flat], [0.5, 0.5])
    assert both.value == pytest.approx((3.2 + 7) / 2)
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2, rel=1e-12)


@pytest.mark.parametrize("power", [-700, -500, 270, 500, 1000])
def test_a_difference_scales_with_its_returns(power):
    a, b = rng.normal(3, 1, 5), rng.normal(2, 2, 6)
    here = welch([a, b], [1.0, -1.0])
    there = welch([np.ldexp(a, power), np.ldexp(b, power)], [1.0, -1.0])
    assert there.p == here.p
    for key in ("value", "low", "high"):
        assert getattr(there, key) == np.ldexp(getattr(here, key), power)


def test_equal_seeds_have_no_width_and_rounding_makes_no_difference():
    tenths = np.array([0.1 + 0.2, 0.3, 0.3, 0.3, 0.3])
    same, other = welch([tenths, np.full(5, 0.3)], [1.0, -1.0]), welch([tenths], [1.0])
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert (other.low, other.high, other.p) == (other.value, other.value, 0)
    assert welch_all([]) == []


def test_seeds_that_agree_have_no_interval_by_rounding():
    """Six times .01 are .06 in floating point, and a sixth of it is not .01."""
    for value in (0.01, 0.1, 1 / 3):
        made = estimate(np.full(6, value))
        assert (made.value, made.low, made.high, made.error) == (value, value, value, 0.0)


def test_holm_is_the_closed_test():
    """Rejected at a level if Bonferroni rejects every intersection that holds the hypothesis."""
    for _ in range(20):
        p = rng.random(4) ** 3
        adjusted = holm(p.tolist())
        for i in range(4):
            subsets = (c for k in range(1, 5) for c in itertools.combinations(range(4), k))
            closed = max(min(1.0, len(c) * min(p[list(c)])) for c in subsets if i in c)
            assert adjusted[i] == pytest.approx(closed, rel=1e-12)
    assert holm([]) == []


def test_p_of_more_counts_pairs_and_half_of_ties():
    a, b = rng.integers(0, 5, 6).astype(float), rng.integers(0, 5, 9).astype(float)
    wins = sum((x > y) + 0.5 * (x == y) for x in a for y in b)
    assert chance_of_more(a, b) == pytest.approx(wins / 54, abs=1e-12)
    # Mann and Whitney's U from the sum of mid-ranks.
    every = np.concatenate([a, b])
    ranks = [(every < x).sum() + ((every == x).sum() + 1) / 2 for x in a]
    assert chance_of_more(a, b) == pytest.approx((sum(ranks) - 6 * 7 / 2) / 54, abs=1e-12)
    assert chance_of_more(b, a) == pytest.approx(1 - chance_of_more(a, b), abs=1e-12)


@pytest.mark.integration
def test_intervals_cover_what_they_say_on_normal_returns():
    draws = np.random.default_rng(0)
    for n in (3, 5, 10):
        made = welch_all([([seeds], [1.0]) for seeds in draws.standard_normal((5_000, n))])
        assert 0.94 < np.mean([each.low <= 0 <= each.high for each in made]) < 0.96


def test_the_iqm_is_what_rliable_printed():
    # rliable 1.2.0, aggregate_iqm of these ten runs.
    k = np.arange(1.0, 11)
    drawn = 10 * np.sin(k * k) + 3 * np.cos(7 * k)
    assert float(iqm(drawn)) == pytest.approx(-3.497691684731701, abs=1e-9)


def test_nan_seeds_are_left_out_and_below_five_seeds_there_is_no_interval():
    values = np.full((5, 3), np.nan)
    values[:, 0] = 1, 2, 3, 4, 1000
    values[:4, 1] = 1, 2, 3, 4
    whole, four, none = estimate_curve(values)
    assert (whole.value, whole.iqm, whole.least, whole.most, whole.seeds) == (202, 3, 1, 1000, 5)
    assert whole.low < 0 < whole.high
    assert (four.value, four.low, four.high, four.seeds) == (2.5, None, None, 4)
    assert none is None
