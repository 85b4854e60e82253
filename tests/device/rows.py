"""The rows of two runs, side by side."""

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.same_rows import timeless


def assert_same(
    found: Sequence[Mapping[str, float]],
    expected: Sequence[Mapping[str, float]],
    rel: float = 1e-4,
) -> None:
    """All metrics of all rows, times aside: sums of float32 may be in another order."""
    assert len(found) == len(expected)
    for row, right in zip(found, expected, strict=True):
        assert timeless(dict(row)) == pytest.approx(
            timeless(dict(right)), rel=rel, abs=1e-7, nan_ok=True
        )
