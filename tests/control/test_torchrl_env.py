"""A TorchRL environment of the user's own, against the Gymnasium environment that it is made of."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase, PendulumEnv, StepCounter, TransformedEnv

from klrl.base.errors import EnvError
from klrl.control.env.contract import Misfit
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.torchrl_env import TorchRLEnv


class CartPole(EnvBase):
    """Gymnasium's, with one-hot actions; a step leaves out ``leave``, adds ``more``."""

    def __init__(self, leave: str = "", spec: TensorSpec | None = None, more: str = "") -> None:
        super().__init__()
        self.env: gymnasium.Env = gymnasium.make("CartPole-v1")
        self.observation_spec = Composite(observation=spec or Unbounded(4))
        self.action_spec = OneHot(2)
        self.reward_spec = Unbounded(1)
        self.leave, self.first, self.more = leave, None, more

    def _set_seed(self, seed: int | None) -> None:
        self.first = seed

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        seed, self.first = self.first, None
        return TensorDict({"observation": torch.tensor(self.env.reset(seed=seed)[0])})

    def _step(self, tensordict: TensorDict) -> TensorDict:
        result = self.env.step(int(tensordict["action"].long().argmax()))
        observation, reward, terminated, truncated, _ = result
        step = {
            "observation": torch.tensor(observation),
            "reward": torch.tensor([float(reward)]),
            "terminated": torch.tensor([terminated]),
            "done": torch.tensor([terminated or truncated]),
        }
        if self.more:
            step[self.more] = torch.tensor([False])
        return TensorDict({key: value for key, value in step.items() if key != self.leave})


class Dice(EnvBase):
    """Draws from torch's global generator, which it seeds; its sum is an attribute."""

    def __init__(self, action: TensorSpec | None = None) -> None:
        super().__init__()
        self.observation_spec = Composite(
            eyes=Categorical(6, shape=()), seen=Composite(sum=Unbounded(1), high=Binary(2))
        )
        self.action_spec = action or Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded(1)
        self.total, self.given = 0.0, torch.zeros(())

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)

    def _result(self) -> dict:
        eyes = torch.randint(6, ())
        self.total += float(eyes)
        high = torch.tensor([eyes > 2, eyes > 4]).to(torch.int8)
        return {"eyes": eyes, "seen": {"sum": torch.tensor([self.total]), "high": high}}

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        self.total = 0.0
        return TensorDict(self._result())

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.given, result = tensordict["action"], self._result()
        reward, end = result["eyes"].float()[None], torch.tensor([self.total > 30])
        return TensorDict({**result, "reward": reward, "done": end, "terminated": end})


def copies(make, count: int = 2, **how) -> VectorGymEnv:
    return VectorGymEnv("own", count, make=lambda: TorchRLEnv("env.target=own", make()), **how)


def test_its_copies_return_what_gymnasiums_own_do() -> None:
    """Observations, rewards, ends, over several episodes: to the bit."""
    own, real = copies(CartPole, seed=7), VectorGymEnv("CartPole-v1", 2, seed=7)
    assert str(own.action_spec) == str(real.action_spec)
    np.testing.assert_array_equal(own.reset_native(), real.reset_native())
    rng, ends = np.random.default_rng(0), 0
    for _ in range(100):
        action = rng.integers(2, size=2)
        pairs = list(zip(own.step_native(action), real.step_native(action), strict=True))
        for mine, other in pairs:
            np.testing.assert_array_equal(mine, other)
        ended = pairs[2][1] | pairs[3][1]
        ends += int(ended.sum())
        if ended.any():
            np.testing.assert_array_equal(own.reset_native(ended), real.reset_native(ended))
    assert ends > 4


def test_a_stateless_one_goes_as_torchrls_rollout() -> None:
    """What it carries (angle, speed, parameters, steps) is handed on as TorchRL's step_mdp does."""
    mine = TorchRLEnv("env", TransformedEnv(PendulumEnv(seed=0), StepCounter(max_steps=5)))
    theirs = TransformedEnv(PendulumEnv(seed=0), StepCounter(max_steps=5))
    theirs.set_seed(3)
    expected = theirs.rollout(5, break_when_any_done=False)
    seen, _ = mine.reset(seed=3)
    assert float(seen["th"]) == float(expected["th"][0])
    for t in range(5):
        seen, reward, terminated, truncated, _ = mine.step(expected["action"][t].numpy())
        assert (reward, float(seen["th"])) == (
            float(expected["next", "reward"][t]),
            float(expected["next", "th"][t]),
        )
        assert (terminated, truncated) == (False, t == 4)


@pytest.mark.parametrize(
    ("spec", "space", "action", "given"),
    [
        (OneHot(3), spaces.Discrete(3), 2, torch.tensor([False, False, True])),
        (Categorical(3, shape=()), spaces.Discrete(3), 2, torch.tensor(2)),
        (Categorical(3, shape=(1,)), spaces.MultiDiscrete([3]), [2], torch.tensor([2])),
        (MultiCategorical([2, 3]), spaces.MultiDiscrete([2, 3]), [1, 2], torch.tensor([1, 2])),
        (
            MultiOneHot([2, 3]),
            spaces.MultiDiscrete([2, 3]),
            [1, 2],
            torch.tensor([False, True, False, False, True]),
        ),
        (Binary(3), spaces.MultiBinary((3,)), [1, 0, 1], torch.tensor([1, 0, 1], dtype=torch.int8)),
        (
            Bounded(-2, 3, (2,), dtype=torch.float64),
            spaces.Box(-2, 3, (2,), np.float64),
            np.array([0.5, 1], np.float32),
            torch.tensor([0.5, 1], dtype=torch.float64),
        ),
        (
            Unbounded((2, 1)),
            spaces.Box(-np.inf, np.inf, (2, 1), np.float32),
            np.array([[0.5], [1]], np.float32),
            torch.tensor([[0.5], [1]]),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_action_of_its_space_is_one_of_its_spec(spec, space, action, given) -> None:
    base = Dice(spec)
    env = TorchRLEnv("env", base)
    assert env.action_space == space
    assert space.contains(np.asarray(action, space.dtype))
    env.reset(seed=0)
    env.step(action)
    assert base.given.dtype == given.dtype
    torch.testing.assert_close(base.given, given)
    assert spec.is_in(base.given)


def test_its_observation_spec_is_a_space_of_its_results() -> None:
    env = TorchRLEnv("env", Dice())
    assert env.observation_space == spaces.Dict(
        eyes=spaces.Discrete(6),
        seen=spaces.Dict(sum=spaces.Box(-np.inf, np.inf, (1,)), high=spaces.MultiBinary((2,))),
    )
    assert env.observation_space.contains(env.reset(seed=0)[0])
    pixels = CartPole(spec=Bounded(0, 255, (3, 8, 8), dtype=torch.uint8))
    assert TorchRLEnv("env", pixels).observation_space == spaces.Box(0, 255, (3, 8, 8), np.uint8)


def test_a_copy_draws_from_a_generator_of_its_own() -> None:
    """It seeds torch's global one; the policy's noise must not know, nor the copy beside it."""
    alone, first, second = (TorchRLEnv("env", Dice()) for _ in range(3))
    action = np.zeros(2, np.float32)
    expected = [alone.reset(seed=1)[0]["eyes"], *(alone.step(action)[0]["eyes"] for _ in range(4))]
    torch.manual_seed(1)
    assert expected == [torch.randint(6, ()) for _ in range(5)]

    torch.manual_seed(5)
    noise = torch.randn(3)
    torch.manual_seed(5)
    found = [first.reset(seed=1)[0]["eyes"]]
    second.reset(seed=2)
    for _ in range(4):
        found.append(first.step(action)[0]["eyes"])
        second.step(action)
    assert found == expected
    assert torch.equal(torch.randn(3), noise)


@pytest.mark.parametrize("terminal", [True, False])
def test_an_end_that_is_not_terminal_is_a_truncation(terminal: bool) -> None:
    class Ends(Dice):
        def _step(self, tensordict: TensorDict) -> TensorDict:
            ended = {"done": torch.tensor([True]), "terminated": torch.tensor([terminal])}
            return super()._step(tensordict).update(ended)

    env = TorchRLEnv("env", Ends())
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.float32))[2:4] == (terminal, not terminal)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (CartPole(), ""),
        (
            CartPole(more="truncated"),
            "torchrl's check_env_specs refuses the specs: AssertionError: The keys of the specs",
        ),
        (
            CartPole(spec=Unbounded(4, dtype=torch.float64)),
            "as torch.float32 of shape [4], but its spec requires torch.float64 of shape [4]",
        ),
    ],
)
def test_results_that_do_not_fit_the_specs_are_named(base: EnvBase, said: str, capfd) -> None:
    if not said:
        TorchRLEnv("env", base).require_specs()
    else:
        with pytest.raises(Misfit, match=re.escape(said)):
            TorchRLEnv("env", base).require_specs()
    assert capfd.readouterr() == ("", "")


def test_a_key_that_is_missing_later_ends_the_run_in_a_line() -> None:
    env = copies(CartPole, 1)
    env.reset_native()
    inner = env.simulators.envs[0].unwrapped
    assert isinstance(inner, TorchRLEnv)
    inner.base.leave = "observation"
    with pytest.raises(EnvError, match="the environment wrote no observation"):
        env.step_native(np.array([1]))
