"""``make kills``, small: one job, killed twice at least."""

import pytest

from benchmarks.reliability.kills import main


@pytest.mark.slow
def test_a_killed_run_is_equal_to_the_bit(capsys, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # main sets another
    assert main(["--kills", "2", "--only", "main"]) == 0
    assert "runs are equal to the bit to undisturbed ones" in capsys.readouterr().out
