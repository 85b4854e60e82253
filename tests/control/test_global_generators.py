"""Environments that draw from Python's and numpy's global generators: one seed, one run."""

from __future__ import annotations

import random
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import klrl
from klrl.report.bits import compare_bits
from tests.conftest import QUICK
from tests.control.test_resumption import EndsAt
from tests.runs.commands import exits, manifest_of, rows_of

pytestmark = pytest.mark.integration


class Dice(gymnasium.Env):
    """Starts and pays by throws of ``random`` and ``np.random``; 8 steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.array([random.gauss(0, 1)], np.float32), {}

    def step(self, action):
        self._step += 1
        seen = np.array([np.random.standard_normal()], np.float32)
        return seen, random.random(), self._step == 8, False, {}


ENV = f"{__name__}:Dice"


@pytest.fixture
def words() -> list[str]:
    own = ["env=custom", f"env.target={ENV}", "env.num_envs=2", "actor=mlp"]
    common = [word for word in QUICK if not word.startswith("env")]
    return [*own, *common, "frames=256", "checkpoint.every=1"]


def stir() -> None:
    """Whatever this process drew before: it is another one's."""
    random.seed()
    np.random.seed()


def test_two_runs_of_a_seed_are_equal_and_so_is_one_that_goes_on(words) -> None:
    folders = [Path("one"), Path("two"), Path("part")]
    for folder in folders[:2]:
        stir()
        klrl.run(*words, folder=folder)
    equal, told = compare_bits(Path("one"), Path("two"))
    assert equal, told
    stir()
    with pytest.raises(KeyboardInterrupt):
        klrl.run(*words, folder="part", callbacks=[EndsAt(3)])
    stir()
    assert exits("resume=part") == 0
    equal, told = compare_bits(Path("one"), Path("part"))
    assert equal, told
    assert {manifest_of(folder)["resume"] for folder in folders} == {"exact"}
    klrl.run(*words, "seed=1", folder="other")
    assert not compare_bits(Path("one"), Path("other"))[0]


def test_evaluations_leave_training_as_it_is_and_repeat_themselves(words) -> None:
    klrl.run(*words, folder=Path("without"))
    klrl.run(*words, "eval.every=1", "eval.episodes=3", folder=Path("with"))
    assert trained(Path("without")) == trained(Path("with"))
    first, second = (klrl.load_run("with").evaluate(3).returns for _ in range(2))
    assert first == second


def trained(folder: Path) -> list[float]:
    returns = [row["reward/raw"] for row in rows_of(folder) if row["iteration"]]
    assert len(returns) == 4
    return returns
