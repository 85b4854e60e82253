"""Means as people read them."""

import math

import pytest

from klrl.base.digits import mean_and_error, places, show, span


@pytest.mark.parametrize(
    "value, error, told",
    [
        (-152.68, 9.9, "-152.7 +- 9.9"),
        (-152.68, 9.96, "-153 +- 10"),  # 9.96 has two digits as 10
        (-152.68, 99.6, "-150 +- 100"),
        (4742.3, 1234.0, "4,700 +- 1,200"),
        (4742.3, 96.0, "4,742 +- 96"),
        (0.8359375, 0.0123, "0.836 +- 0.012"),
        (12345.678, 0.0456, "12,345.678 +- 0.046"),
        (0.2, 4.4, "0.2 +- 4.4"),
        (-0.004, 0.5, "0.00 +- 0.50"),
        (200.0, 0.0, "200 +- 0"),
        (200.0, 1e-14, "200 +- 0"),  # rounding of equal returns
        (math.nan, 1.0, "nan +- 1"),
        (math.inf, 1.0, "inf +- 1"),
        (-152.684, None, "-152.68"),
        (-152.684, math.nan, "-152.68 +- nan"),
    ],
)
def test_a_mean_has_the_digits_of_its_error(value, error, told) -> None:
    assert mean_and_error(value, error, 5) == told


@pytest.mark.parametrize(
    "value, error, told",
    [
        (4742.3, 105.0, "4,740"),
        (4742.3, 1050.0, "4,700"),
        (0.4712, 0.002, "0.471"),
        (-0.04, 60.0, "0"),
        (0.4712, None, "0.471"),
    ],
)
def test_a_table_has_two_or_three_digits(value, error, told) -> None:
    assert show(value, places(value, error)) == told


def test_a_span_is_rounded_as_its_mean() -> None:
    assert span(94.96, 112.2, 0) == "95 to 112"
