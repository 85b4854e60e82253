"""``make soak``, small: eight runs in one process; and that what grows is told."""

import random

import numpy
import pytest

from benchmarks.reliability.soak import sample, show, slope, soak, trend


def test_a_slope_is_that_of_least_squares() -> None:
    values = [random.Random(i).random() + 0.1 * i for i in range(30)]
    assert slope(values) == pytest.approx(numpy.polyfit(range(30), values, 1)[0])


def test_what_grows_is_told(capsys) -> None:
    noisy = [500 + random.Random(i).random() for i in range(200)]
    leaks = [value + 0.3 * i for i, value in enumerate(noisy)]
    assert trend("memory MB", noisy).flat
    assert not trend("memory MB", leaks).flat
    assert not trend("files", [9.0] * 100 + [10.0] * 100).flat
    assert trend("files", [3.0, 5.0] + [9.0] * 100).flat, "a warm-up"
    assert show("x", 200, [trend("memory MB", noisy)])
    assert not show("x", 200, [trend("memory MB", noisy), trend("memory MB", leaks)])
    assert "GROWS" in capsys.readouterr().out


def test_a_sample_counts_what_this_process_holds(tmp_path) -> None:
    before = sample()
    with (tmp_path / "x").open("w"):
        assert sample()["files"] == before["files"] + 1
    assert sample()["files"] == before["files"]
    assert 10 < before["memory MB"] < 100_000


@pytest.mark.slow
def test_eight_runs_in_one_process() -> None:
    trends = soak("many runs", 8)
    assert [t.name for t in trends] == ["memory MB", "files", "threads", "temporary files"]
    assert all(t.flat for t in trends), trends
