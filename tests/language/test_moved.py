"""A language run whose reward function moves its folder, changes the current folder, or exits."""

import sys
from pathlib import Path

import pytest

from tests.runs import commands
from tests.runs.commands import manifest_of, rows_of, samples_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN, MOVED = Path("run"), Path("moved")
REWARDS = """
import os, pathlib, sys
here, calls = pathlib.Path.cwd(), []
def length(prompts, responses, rows):
    calls.append(1)
    return [float(len(each)) for each in responses]
def moves(prompts, responses, rows):
    if len(calls) == 3:
        (here / "run").rename(here / "moved")
    return length(prompts, responses, rows)
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
def leaves(prompts, responses, rows):
    if len(calls) == 2:
        sys.exit(0)
    return length(prompts, responses, rows)
"""
WORDS = ("frames=64", "eval.every=2", "eval.episodes=4", "logger=tensorboard")


@pytest.fixture(autouse=True)
def _rewards() -> None:
    Path("my_rewards.py").write_text(REWARDS)
    Path("elsewhere").mkdir()


def test_a_run_that_its_reward_function_moves_is_resumed_as_one(exits) -> None:
    assert exits("env.reward=my_rewards:length", *WORDS)[0] == 0
    whole = [(row["samples"], row.get("eval/return")) for row in rows_of(RUN)]
    shown = samples_of(RUN)
    RUN.rename("whole")
    sys.modules["my_rewards"].calls.clear()
    code, _, err = exits("env.reward=my_rewards:moves", *WORDS)
    assert (code, len(err.splitlines())) == (1, 1), err
    assert "run: was moved or deleted" in err
    assert not RUN.exists()
    assert exits("resume=moved")[0] == 0
    assert not RUN.exists()
    assert manifest_of(MOVED)["status"] == "finished"
    assert [(row["samples"], row.get("eval/return")) for row in rows_of(MOVED)] == whole
    assert [each["response"] for each in samples_of(MOVED)] == [each["response"] for each in shown]


def test_a_reward_function_may_change_the_current_folder(exits) -> None:
    here = Path.cwd()
    assert exits("env.reward=my_rewards:wanders", *WORDS)[0] == 0
    assert exits("resume=run", "frames=96")[0] == 0
    assert commands.exits("evaluate", "run", "--episodes=2") == 0
    assert Path.cwd() == here
    assert not list(Path("elsewhere").iterdir())
    assert manifest_of(RUN)["status"] == "finished"
    assert (RUN / "curves.png").exists()


def test_a_reward_function_that_exits_is_no_success(exits) -> None:
    code, _, err = exits("env.reward=my_rewards:leaves", *WORDS)
    assert (code, len(err.splitlines())) == (1, 1), err
    assert "raised SystemExit: 0" in err
    assert manifest_of(RUN)["status"] == "failed"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("how", ["removed", "cut"])
def test_a_run_whose_rows_its_reward_function_spoils_fails(name: str, how: str, exits) -> None:
    Path("spoil").write_text(f"{name} {how}")
    sys.modules.pop("my_rewards", None)
    code, _, err = exits("env.reward=my_rewards:spoils", *WORDS)
    assert (code, len(err.splitlines())) == (1, 1), err
    assert name in err
    assert manifest_of(RUN)["status"] == "failed"
    code, _, err = exits("resume=run", "trust=run")
    assert code == 0, err
    assert rows_of(RUN)[-1]["samples"] == 64
