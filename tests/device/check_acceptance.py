"""``make gpu`` asks how an update ran: a fallback is a failure, not a figure."""

from __future__ import annotations

import contextlib
import time
import unittest

import pytest
import torch

from benchmarks import gpu

TINY = (
    *("env=pendulum", "env.num_envs=2", "collector.steps=32", "learner.minibatches=2"),
    "actor.hidden=[8]",
)


@pytest.fixture(autouse=True)
def _as_written(monkeypatch) -> None:
    """The steps of check_capture.py are compiled; here the capture alone is looked at."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)


def refused(*_: object) -> None:
    raise RuntimeError("seeded: no capture")


def test_an_update_that_falls_back_is_told_from_a_captured_one(monkeypatch) -> None:
    assert gpu.disagreement("captured", *TINY) < gpu.TOLERANCE
    monkeypatch.setattr("klrl.control.run.compiled.Captured", refused)
    assert gpu.disagreement("eager", *TINY) < gpu.TOLERANCE
    with pytest.raises(AssertionError, match=r"ran as learner\.compile=false, not jit"):
        gpu.disagreement("captured", *TINY)


def test_a_captured_action_is_numpys() -> None:
    assert gpu.acting_disagreement() < 1e-6


def test_a_step_that_is_compiled_and_not_captured_is_told_too(monkeypatch) -> None:
    monkeypatch.setattr("klrl.control.run.compiled.Captured", lambda step, _: step)
    with pytest.raises(AssertionError, match="0 replays of a CUDA graph in 4 gradient steps"):
        gpu.disagreement("captured", *TINY)


def late(_: object) -> None:
    """Goes on after any Exception, as an update does whose compiler fails."""
    with contextlib.suppress(Exception):
        time.sleep(9)


def elsewhere(_: object) -> str:
    raise unittest.SkipTest("it is not here")


def test_one_failure_is_exit_code_1_and_time_that_is_over_is_one(monkeypatch, capsys) -> None:
    checks = {"good": lambda _: "well", "elsewhere": elsewhere, "late": late}
    monkeypatch.setattr(gpu, "checks", lambda _: checks)
    with pytest.raises(SystemExit) as end:
        gpu.main(["--no-save", "--seconds", "0.3"])
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "ok    good: well (" in said
    assert "skip  elsewhere: it is not here (" in said
    assert "FAIL  late: the time of all checks is over" in said
    with pytest.raises(SystemExit) as end:
        gpu.main(["--no-save", "--only", "good"])
    assert end.value.code == 0
