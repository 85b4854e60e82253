"""``make fuzz``, small: some inputs of each kind; and that wrong answers are told."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability.ended import Ended
from benchmarks.reliability.fuzz import verdict
from benchmarks.reliability.inputs import Input

ROOT = Path(__file__).parents[2]
START, COUNT = 1053, 6


@pytest.mark.slow
def test_inputs_of_every_kind_are_answered() -> None:
    command = [sys.executable, "-m", "benchmarks.reliability.fuzz"]
    ran = subprocess.run(
        [*command, f"--start={START}", f"--count={COUNT}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith(f"{COUNT} inputs, 0 violations\n")
    kinds = {line.split()[1] for line in ran.stdout.splitlines()}
    assert kinds >= {"words,", "yaml,"}


def test_verdicts() -> None:
    bad = Input("words", ("kl.coef=x",), False, ("kl.coef",))
    right = Ended(2, "", "klrl: kl.coef=x: give a number\n", 1.0)
    assert verdict(bad, right, []) == []
    assert verdict(bad, right, ["outputs/a"]) == ["refused, and leaves outputs/a"]
    other = dataclasses.replace(right, err="klrl: something is wrong\n")
    assert verdict(bad, other, []) == ["does not name kl.coef: klrl: something is wrong"]
    mute = dataclasses.replace(right, err="kl.coef=x\n")
    assert verdict(bad, mute, []) == ["does not say who speaks: kl.coef=x"]
    assert verdict(dataclasses.replace(bad, valid=True), right, [])[0].startswith("exit 2, not 0")
