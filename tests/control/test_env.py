"""The batched environment against Gymnasium's own environments, step by step."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from torchrl.envs import check_env_specs

from klrl.base.seeds import derived_seed
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.gym_make import make_one
from tests.agents import gym, make_env
from tests.control.toys import Drifting

KEYS = ("reward", "terminated", "truncated", "episode_reward", "step_count")


def replay(env_id: str, seed: int, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Observations before and after each step, and KEYS; another seeded episode follows an end."""
    env = gymnasium.make(env_id)
    seen, _ = env.reset(seed=derived_seed(seed, "episode", 0))
    episodes, before, after, told, sums = 0, [], [], [], np.zeros(2)
    for action in actions:
        before.append(seen)
        seen, reward, *ends, _ = env.step(action)
        sums += (reward, 1)
        after.append(seen)
        told.append((reward, *ends, *sums))
        if any(ends):
            episodes += 1
            seen, _ = env.reset(seed=derived_seed(seed, "episode", episodes))
            sums = np.zeros(2)
    columns = dict(zip(KEYS, np.array(told, np.float64).T, strict=True))
    return {"before": np.array(before), "after": np.array(after), **columns}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Hopper-v5"])
def test_steps_resets_and_ends_are_gymnasiums(env_id: str) -> None:
    """Several episodes each: Pendulum truncates at 200, CartPole and Hopper terminate early."""
    env = make_env(gym(env_id, 3), seed=11)
    torch.manual_seed(0)
    rollout = env.rollout(450, break_when_any_done=False)
    for copy in range(3):
        expected = replay(env_id, 11 + copy, rollout["action"][copy].numpy())
        after = rollout["next"][copy]
        np.testing.assert_allclose(rollout["observation"][copy], expected["before"], rtol=1e-6)
        np.testing.assert_allclose(after["observation"], expected["after"], rtol=1e-6)
        for key in KEYS:
            np.testing.assert_allclose(after[key].squeeze(-1), expected[key], rtol=1e-5)
        done = expected["terminated"] + expected["truncated"] > 0
        np.testing.assert_array_equal(after["done"].squeeze(-1), done)
        assert done.sum() >= 2


@pytest.mark.parametrize(
    ("env_id", "size"),
    [
        *(("CliffWalking-v1", 48), ("Blackjack-v1", 3), ("Acrobot-v1", 6), ("Pendulum-v1", 3)),
        *(("CartPole-v1", 4), ("HalfCheetah-v5", 17), ("Hopper-v5", 11)),
    ],
)
def test_a_copy_is_one_row_of_numbers_and_specs_hold(env_id: str, size: int) -> None:
    env = make_env(gym(env_id, 3), seed=0)
    assert env.observation_spec["observation"].shape == (3, size)
    check_env_specs(env)  # raises where a spec and a rollout differ
    assert env.reset()["observation"].shape == (3, size)


def test_out_of_bounds_actions_are_clipped_for_the_simulator_only() -> None:
    env = VectorGymEnv("Pendulum-v1", 1, seed=0)
    clipped = VectorGymEnv("Pendulum-v1", 1, seed=0)
    far = env.reset().set("action", torch.tensor([[50.0]]))
    bound = clipped.reset().set("action", torch.tensor([[2.0]]))
    stepped = env.step(far)
    assert float(stepped["action"]) == 50.0
    torch.testing.assert_close(stepped["next", "reward"], clipped.step(bound)["next", "reward"])


def test_the_longest_episode_ends_at_the_shortest_limit() -> None:
    def make(*limits: int) -> gymnasium.Env:
        env = gymnasium.make("Pendulum-v1").unwrapped
        for limit in limits:
            env = TimeLimit(env, limit)
        return env

    for limits, longest in (((), None), ((200,), 200), ((200, 500), 200), ((500, 200), 200)):
        env = VectorGymEnv("X", 1, make=partial(make, *limits))
        assert env.simulators.longest_episode == longest


def test_a_wrapper_of_fixed_statistics_is_served(settings) -> None:
    env = make_one(settings("env=custom", "env.target=tests.control.toys:frozen").env)
    assert env.reset(seed=3)[0] == pytest.approx(Drifting().reset(seed=3)[0] / 2)
