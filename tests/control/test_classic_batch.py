"""Classic control in one batch, to the byte: against ``gymnasium.make``, copy by copy."""

from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control.acrobot import wrap

from klrl.control.env import batch, classic_batch
from klrl.control.env.copies import VectorGymEnv
from tests.control.test_mujoco_batch import both, compare, masked

#: Limits of steps that some episodes reach and others do not.
LIMITS = {"Pendulum-v1": 200, "CartPole-v1": 150, "MountainCar-v0": 200, "Acrobot-v1": 120}
#: Every argument that a step reads has another value than its default.
SETTINGS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"g": 14, "max_episode_steps": 33},
    "CartPole-v1": {"sutton_barto_reward": True, "max_episode_steps": 21},
    "MountainCar-v0": {"goal_velocity": 0.03, "max_episode_steps": 190},
    "Acrobot-v1": {"max_episode_steps": 90},
}
LONG = [pytest.param(x, marks=[pytest.mark.slow] * (x == "Acrobot-v1")) for x in LIMITS]


@pytest.mark.parametrize("env_id", LONG)
def test_each_of_20_000_results_is_gymnasiums(env_id: str) -> None:
    terminated, truncated = compare(env_id, {"max_episode_steps": LIMITS[env_id]}, 8, 2500)
    assert (terminated > 10, truncated > 10) == (env_id != "Pendulum-v1", True)


@pytest.mark.parametrize("env_id", SETTINGS)
def test_each_argument_of_a_task_is_read(env_id: str) -> None:
    terminated, truncated = compare(env_id, SETTINGS[env_id], 5, 500)
    assert (terminated > 0, truncated > 0) == (env_id != "Pendulum-v1", True)


@pytest.mark.parametrize("env_id", LIMITS)
def test_copies_that_wait_are_left_alone(env_id: str) -> None:
    masked(env_id)


def test_angles_are_wrapped_as_gymnasiums() -> None:
    angles = np.random.default_rng(0).uniform(-40, 40, 500)
    angles[:4] = np.pi, -np.pi, 3 * np.pi, np.nan
    expected = np.array([wrap(x, -np.pi, np.pi) for x in angles])
    assert classic_batch._wrapped(angles).tobytes() == expected.tobytes()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Gymnasium: NaN
def test_a_torque_that_is_not_finite_gives_gymnasiums_results() -> None:
    pair = both("Pendulum-v1")
    for env in pair:
        env.reset_native()
    for value in (0.5, np.inf, np.nan, 0.2):
        actions = np.array([[value], [1], [-np.inf]], "f4")
        results = [[x.tobytes() for x in env.step_native(actions)] for env in pair]
        assert results[0] == results[1]


def test_a_product_in_place_of_a_power_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """C's pow(x, 2) and x * x differ in one of 1,000 numbers."""
    advance = classic_batch.PendulumBatch._advance

    def with_products(self, actions, mask):
        (th, v), u = self._state, actions[:, 0]
        angle = (th + np.pi) % (2 * np.pi) - np.pi
        parts, _, never = advance(self, actions, mask)
        return parts, -(angle * angle + 0.1 * (v * v) + 0.001 * (u * u)), never

    monkeypatch.setattr(classic_batch.PendulumBatch, "_advance", with_products)
    monkeypatch.setattr(batch, "_compared", set())
    stepped = VectorGymEnv("Pendulum-v1", 2).simulators.stepped
    assert stepped.startswith("2 copies one by one (a batch differs from Gymnasium in step ")
