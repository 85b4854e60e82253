"""``make soak``, small: eight runs in one process; and that what grows is told."""

import random

import pytest

from benchmarks.reliability.soak import show, soak, trend


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


@pytest.mark.slow
def test_eight_runs_in_one_process() -> None:
    trends = soak("many runs", 8)
    assert [t.name for t in trends] == ["memory MB", "files", "threads", "temporary files"]
    assert all(t.flat for t in trends), trends
