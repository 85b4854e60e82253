"""``klrl evaluate RUN KEY=VALUE``: a policy on another task."""

import json

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

import klrl
from klrl.base.seeds import derived_seed
from klrl.control.env.gym_make import make_gym
from klrl.train.evaluate import evaluate_run
from tests.conftest import QUICK
from tests.runs.commands import exits

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("other_task") / "run"
    return str(klrl.run(*QUICK, "env.kwargs.g=12.0", folder=folder))


def by_hand(run: str, env: gymnasium.Env, seed: int) -> float:
    """One episode of the policy's mode in Gymnasium's own environment."""
    policy = klrl.load_policy(run)
    seen, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            out = policy(TensorDict({"observation": torch.tensor(seen)[None]}, [1]))
        action = out["action"][0].numpy().clip(env.action_space.low, env.action_space.high)
        seen, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


@pytest.mark.parametrize(
    ("words", "kwargs"),
    [
        ([], {"g": 12.0}),
        (["env.kwargs.g=14"], {"g": 14}),
        (["env.id=Pendulum-v1"], {}),
        (["env.kwargs.g=3", "env.id=Pendulum-v1"], {"g": 3}),
    ],
)
def test_returns_are_gymnasiums_on_that_task(run, words, kwargs) -> None:
    result = evaluate_run(run, words, episodes=1, seed=5)
    expected = by_hand(run, make_gym("Pendulum-v1", kwargs), derived_seed(5, "evaluate"))
    assert result.mean == pytest.approx(expected, rel=1e-3)


def test_the_command_line_takes_words_after_flags_and_names_the_task(run, capsys) -> None:
    assert exits("evaluate", run, "--episodes", "2", "env.kwargs.g=14", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["eval/episodes"] == 2
    assert exits("evaluate", run, "env.kwargs.g=14", "--episodes", "2") == 0
    told = capsys.readouterr().out
    value, error = map(float, told.replace(",", "").removeprefix("return ").split()[:3:2])
    # Rounded to two digits of the error.
    assert value == pytest.approx(first["eval/return"], abs=0.05 * error)
    assert "on env.kwargs.g=14" in told
