"""``make kills``, small: one job, killed twice at least."""

from __future__ import annotations

import pytest

from benchmarks.reliability.kills import jobs_of, main


def test_jobs_have_every_controller_and_reference() -> None:
    words = " ".join(job.words for job in jobs_of(slow=False))
    for choice in ("schedule", "adaptive", "dual", "held"):
        assert f"controller={choice}" in words
    for choice in ("ema", "periodic", "checkpoint", "adapter_off"):
        assert f"reference={choice}" in words
    for task in ("pendulum", "cartpole", "acrobot", "half_cheetah", "hopper"):
        assert f"env={task}" in words
    assert "experiment=sort_digits" in words
    assert "checkpoint.every=2" not in words


def test_an_unknown_job_is_refused() -> None:
    with pytest.raises(SystemExit, match="--only nobody: choose among lm, main"):
        main(["--only", "nobody"])


@pytest.mark.slow
def test_a_killed_run_is_equal_to_the_bit(capsys, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # main sets another
    assert main(["--kills", "2", "--only", "main"]) == 0
    assert "runs are equal to the bit to undisturbed ones" in capsys.readouterr().out
