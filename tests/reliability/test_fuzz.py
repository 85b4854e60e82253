"""``make fuzz``, small: some inputs of each kind; and that wrong answers are told."""

import dataclasses
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.reliability import fuzz, words
from benchmarks.reliability.ended import Ended
from benchmarks.reliability.fuzz import make_input, try_input, verdict

ROOT = Path(__file__).parents[2]
START, COUNT = 1053, 6


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    fuzz.import_all()
    folder = tmp_path_factory.mktemp("stock").resolve()
    fuzz.make_stock(folder)
    return folder


@pytest.mark.slow
def test_inputs_of_every_kind_are_answered() -> None:
    command = [sys.executable, "-m", "benchmarks.reliability.fuzz"]
    ran = subprocess.run(
        [*command, f"--start={START}", f"--count={COUNT}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith(f"{COUNT} inputs, 0 violations\n")
    kinds = {line.split()[1] for line in ran.stdout.splitlines()}
    assert kinds >= {"words,", "prompts,", "yaml,", "run"}


@pytest.mark.integration
def test_a_fifth_of_the_inputs_is_valid_and_a_number_makes_one_input(stock) -> None:
    kinds = Counter(make_input(0, number, stock).valid for number in range(600))
    assert kinds[True] >= 120
    assert kinds[False] >= 90
    for number in range(50):
        one, same = (make_input(3, number, stock) for _ in range(2))
        assert dataclasses.replace(one, prepare=same.prepare) == same


@pytest.mark.integration
def test_a_fault_of_klrls_is_told(stock, tmp_path, monkeypatch) -> None:
    import klrl.cli.run

    given = words.conflicting(random.Random(0))

    def broken(*args: object, **options: object) -> None:
        Path("outputs/left").mkdir(parents=True)
        raise KeyError("kl")

    with monkeypatch.context() as patch:
        patch.setattr(klrl.cli.run, "job_config", broken)
        patch.setattr(klrl.cli.run, "parse_args", broken)
        _, wrong = try_input(given, tmp_path, real=False)
    assert any(each.startswith("traceback: KeyError: 'kl'") for each in wrong)
    good = words.Input("words", ("env=pendulum", "device=cpu", "logger=none"), False, ())
    (tmp_path / "empty").mkdir()
    _, wrong = try_input(good, tmp_path / "empty", real=False)
    assert wrong == ["exit 0, not 2: "]


def test_verdicts() -> None:
    bad = words.Input("words", ("kl.coef=x",), False, ("kl.coef",))
    right = Ended(2, "", "klrl: kl.coef=x: give a number\n", 1.0)
    assert verdict(bad, right, []) == []
    assert verdict(bad, right, ["outputs/a"]) == ["refused, and leaves outputs/a"]
    other = dataclasses.replace(right, err="klrl: something is wrong\n")
    assert verdict(bad, other, []) == ["does not name kl.coef: klrl: something is wrong"]
    mute = dataclasses.replace(right, err="kl.coef=x\n")
    assert verdict(bad, mute, []) == ["does not say who speaks: kl.coef=x"]
    assert verdict(dataclasses.replace(bad, valid=True), right, [])[0].startswith("exit 2, not 0")
