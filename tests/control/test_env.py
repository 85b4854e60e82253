"""The batched environment against Gymnasium's own environments, step by step."""

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import check_env_specs

from klrl.base.errors import ConfigError, NonFiniteError
from klrl.config import EnvConfig
from klrl.control.copies import VectorGymEnv
from klrl.control.env import make_env


def config(env_id: str, num_envs: int = 3, **kwargs: object) -> EnvConfig:
    return EnvConfig(env_id, dict(kwargs), num_envs, True, 1.0, name="gym")


def replay(env_id: str, seed: int, actions: np.ndarray) -> tuple[list, list, list]:
    """Observations after each step, rewards and (terminated, truncated), resetting when done."""
    env = gymnasium.make(env_id)
    env.reset(seed=seed)
    observations, rewards, ends = [], [], []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        rewards.append(reward)
        ends.append((terminated, truncated))
        if terminated or truncated:
            env.reset()
    return observations, rewards, ends


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Hopper-v5"])
def test_steps_resets_and_ends_are_gymnasiums(env_id: str) -> None:
    """Several episodes each: Pendulum truncates at 200, CartPole and Hopper terminate early."""
    env = make_env(config(env_id), seed=11)
    torch.manual_seed(0)
    rollout = env.rollout(450, break_when_any_done=False)
    assert rollout["next", "done"].any()
    for copy in range(3):
        actions = rollout["action"][copy].numpy()
        observations, rewards, ends = replay(env_id, 11 + copy, actions)
        after = rollout["next"][copy]
        np.testing.assert_allclose(after["observation"], np.array(observations), rtol=1e-6)
        np.testing.assert_allclose(after["reward"].squeeze(-1), rewards, rtol=1e-6)
        np.testing.assert_array_equal(
            torch.cat([after["terminated"], after["truncated"]], -1).numpy(), np.array(ends)
        )


def test_episode_return_and_length_count_one_episode() -> None:
    env = make_env(config("CartPole-v1"), seed=0)
    rollout = env.rollout(200, break_when_any_done=False)
    done = rollout["next", "done"][0].squeeze(-1)
    ends = done.nonzero().squeeze(-1).tolist()
    lengths = np.diff([-1, *ends])
    assert len(ends) > 2
    np.testing.assert_array_equal(rollout["next", "step_count"][0, ends, 0], lengths)
    np.testing.assert_allclose(rollout["next", "episode_reward"][0, ends, 0], lengths)


def test_truncation_keeps_the_last_observation_and_the_next_episode_starts_anew() -> None:
    env = make_env(config("Pendulum-v1"), seed=0)
    rollout = env.rollout(202, break_when_any_done=False)
    last, first = rollout["next", "observation"][:, 199], rollout["observation"][:, 200]
    assert rollout["next", "truncated"][:, 199].all()
    assert not rollout["next", "terminated"].any()
    assert (last - first).abs().amax(-1).min() > 1e-3


def test_out_of_bounds_actions_are_clipped_for_the_simulator_only() -> None:
    env = VectorGymEnv("Pendulum-v1", 1, seed=0)
    clipped = VectorGymEnv("Pendulum-v1", 1, seed=0)
    far = env.reset().set("action", torch.tensor([[50.0]]))
    bound = clipped.reset().set("action", torch.tensor([[2.0]]))
    stepped = env.step(far)
    assert float(stepped["action"]) == 50.0
    torch.testing.assert_close(stepped["next", "reward"], clipped.step(bound)["next", "reward"])


@pytest.mark.parametrize(
    ("env_id", "size"), [("CliffWalking-v1", 48), ("Blackjack-v1", 3), ("Acrobot-v1", 6)]
)
def test_a_copy_is_one_row_of_numbers(env_id: str, size: int) -> None:
    env = make_env(config(env_id), seed=0)
    assert env.observation_spec["observation"].shape == (3, size)
    check_env_specs(env)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1", "HalfCheetah-v5", "Hopper-v5"])
def test_specs_hold(env_id: str) -> None:
    env = make_env(config(env_id), seed=0)
    check_env_specs(env)  # raises where a spec and a rollout differ
    assert env.reset()["observation"].shape == env.observation_spec["observation"].shape


def test_kwargs_reach_the_simulator() -> None:
    weightless = VectorGymEnv("Pendulum-v1", 1, kwargs={"g": 0.0}, seed=0)
    heavy = VectorGymEnv("Pendulum-v1", 1, seed=0)
    action = torch.zeros(1, 1)
    states = [
        e.step(e.reset().set("action", action))["next", "observation"] for e in (weightless, heavy)
    ]
    assert float((states[0] - states[1]).abs().max()) > 1e-4


class Broken(gymnasium.Env):
    """Returns NaN after three steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where: str = "observation", value: float = np.nan) -> None:
        self.where, self.value, self.steps = where, value, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2), {}

    def step(self, action):
        self.steps += 1
        value = self.value if self.steps > 3 else 0.0
        observation = np.full(2, value if self.where == "observation" else 0.0)
        return observation, value if self.where == "reward" else 0.0, False, False, {}


gymnasium.register("klrl-test/Broken-v0", Broken, disable_env_checker=True)
gymnasium.register(
    "klrl-test/Many-v0",
    lambda: gymnasium.wrappers.TransformAction(
        Broken(), lambda a: a[0], gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])
    ),
)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39], ids=str)
@pytest.mark.parametrize("where", ["observation", "reward"])
def test_a_value_that_is_not_finite_in_float32_is_named(where: str, value: float) -> None:
    env = make_env(config("klrl-test/Broken-v0", 2, where=where, value=value), seed=0)
    with pytest.raises(NonFiniteError, match=rf"{where} of klrl-test/Broken-v0 \(copy 0\)"):
        env.rollout(10)


def test_unserved_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="its action space is Tuple"):
        make_env(config("klrl-test/Many-v0"), seed=0)


def test_mujoco_leaves_no_log_in_the_working_folder(tmp_path, caplog) -> None:
    make_env(config("HalfCheetah-v5", 1), seed=0)
    assert not list(tmp_path.glob("MUJOCO_LOG*"))
    assert not caplog.records or caplog.records[0].levelname == "DEBUG"
