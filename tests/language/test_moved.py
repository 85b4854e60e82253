"""A language run whose reward function changes the current folder, or spoils the run's rows."""

import sys
from pathlib import Path

import pytest

from tests.runs import commands
from tests.runs.commands import manifest_of, rows_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN = Path("run")
REWARDS = """
import os, pathlib
here, calls = pathlib.Path.cwd(), []
def length(prompts, responses, rows):
    calls.append(1)
    return [float(len(each)) for each in responses]
def spoils(prompts, responses, rows):
    name, how = (here / "spoil").read_text().split()
    if len(calls) == 3 and how == "removed":
        (here / "run" / name).unlink()
    elif len(calls) == 3:
        os.truncate(here / "run" / name, (here / "run" / name).stat().st_size // 2)
    return length(prompts, responses, rows)
def wanders(prompts, responses, rows):
    os.chdir(here / "elsewhere")
    return length(prompts, responses, rows)
"""
WORDS = ("frames=64", "eval.every=2", "eval.episodes=4", "logger=tensorboard")


@pytest.fixture(autouse=True)
def _rewards() -> None:
    Path("my_rewards.py").write_text(REWARDS)
    Path("elsewhere").mkdir()


def test_a_reward_function_may_change_the_current_folder(exits) -> None:
    here = Path.cwd()
    assert exits("env.reward=my_rewards:wanders", *WORDS)[0] == 0
    assert exits("resume=run", "frames=96")[0] == 0
    assert commands.exits("evaluate", "run", "--episodes=2") == 0
    assert Path.cwd() == here
    assert not list(Path("elsewhere").iterdir())
    assert manifest_of(RUN)["status"] == "finished"
    assert (RUN / "curves.png").exists()


@pytest.mark.parametrize("how", ["removed", "cut"])
def test_a_run_whose_samples_its_reward_function_spoils_fails(how: str, exits) -> None:
    """tests/runs/test_moved.py spoils the other files."""
    name = "samples.jsonl"
    Path("spoil").write_text(f"{name} {how}")
    sys.modules.pop("my_rewards", None)
    code, _, err = exits("env.reward=my_rewards:spoils", *WORDS)
    assert (code, len(err.splitlines())) == (1, 1), err
    assert name in err
    assert manifest_of(RUN)["status"] == "failed"
    code, _, err = exits("resume=run", "trust=run")
    assert code == 0, err
    assert rows_of(RUN)[-1]["samples"] == 64
