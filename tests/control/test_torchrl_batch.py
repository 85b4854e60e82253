"""A TorchRL environment of the user's own, as simulators that step together."""

import re
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl._utils import seed_generator
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
from torchrl.envs import EnvBase

from klrl.base.errors import EnvError
from klrl.base.seeds import derived_seed
from klrl.control.env.contract import Misfit
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.observation import layout_of
from klrl.control.env.pendulum import Pendulum
from klrl.control.env.torchrl_batch import TorchRLBatch, as_batch


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


def batch(make, count: int = 2, *keys: str) -> TorchRLBatch:
    made = as_batch("env.target=own", make(), make, count)
    assert isinstance(made, TorchRLBatch)
    if keys:
        made.select(keys)
    made.prepare(layout_of("env.target=own", made.observation_space, made.action_space))
    return made


def copies(make, count: int = 2, **how) -> VectorGymEnv:
    own = partial(as_batch, "env.target=own")
    return VectorGymEnv("", make=lambda: own(make(), make, count), setting="env.target=own", **how)


def test_an_environment_without_a_batch_steps_as_gymnasiums_copies() -> None:
    """Observations, rewards, ends, over several episodes, given the same resets: to the bit."""
    own, real = batch(CartPole), VectorGymEnv("CartPole-v1", 2, batch=False).simulators
    seed = derived_seed(0, "episode", 0)
    mine = own.reset(None)
    np.testing.assert_array_equal(mine, real.reset(None, [seed, seed_generator(seed)]))
    rng, ends = np.random.default_rng(0), 0
    for _ in range(100):
        action = rng.integers(2, size=2)
        results = own.step(action), real.step(action)
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
        ended = results[0][2] | results[0][3]
        ends += int(ended.sum())
        if ended.any():
            np.testing.assert_array_equal(own.reset(ended), real.reset(ended, [None] * 2))
    assert ends > 4


@pytest.mark.parametrize("count", [1, 7])
def test_a_batch_goes_as_a_plain_loop_of_torchrls(count: int) -> None:
    """Pendulums with limits of their own, over their ends, to the bit."""
    env = batch(lambda: Limited(count), count, "observation")
    theirs, rng, seen = Limited(count), np.random.default_rng(0), env.reset(None)
    theirs.set_seed(derived_seed(0, "episode", 0))
    data, ends = theirs.reset(TensorDict(batch_size=[count])), 0
    for _ in range(60):
        np.testing.assert_array_equal(seen, shown(data))
        action = rng.uniform(-3, 3, (count, 1)).astype(np.float32)
        data = theirs.step(data.set("action", torch.from_numpy(action)))
        after, reward, terminated, truncated = env.step(action)
        np.testing.assert_array_equal(after, shown(data["next"]))
        np.testing.assert_array_equal(reward, data["next", "reward"][:, 0])
        np.testing.assert_array_equal(truncated, data["next", "done"][:, 0])
        assert not terminated.any()
        ended, data = data["next", "done"], theirs.step_mdp(data)
        seen = after
        if ended.any():
            ends += int(ended.sum())
            data = theirs.reset(data.set("_reset", ended), set_state=False)
            data.pop("_reset", None)
            seen = env.reset(truncated)
    assert ends >= 10 * count


class Limited(Pendulum):
    """Episodes of 3 to 5 steps: that of simulator i has 3 + i modulo 3."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def _step(self, tensordict: TensorDict) -> TensorDict:
        after = Pendulum._step(tensordict)
        over = after["steps"] >= 3 + torch.arange(len(after["steps"]))[:, None] % 3
        return after.update({"done": over, "truncated": over})


def shown(data: TensorDict) -> np.ndarray:
    angle = data["th"]
    return torch.stack([angle.cos(), angle.sin(), data["thdot"]], 1).numpy()


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
    env = batch(lambda: Dice(spec))
    assert env.action_space == space
    assert space.contains(np.asarray(action, space.dtype))
    env.reset(None)
    env.step(
        np.stack([np.asarray(action).reshape(-1)] * 2).reshape(2, *np.shape(action)[:1] and (-1,))
    )
    for base in env.env._envs:
        assert base.given.dtype == given.dtype
        torch.testing.assert_close(base.given, given)
        assert spec.is_in(base.given)


def test_its_observation_spec_is_a_space_of_its_results() -> None:
    env = batch(Dice)
    assert env.seen_space == spaces.Dict(
        eyes=spaces.Discrete(6),
        seen=spaces.Dict(sum=spaces.Box(-np.inf, np.inf, (1,)), high=spaces.MultiBinary((2,))),
    )
    shown = env.reset(None)[0].tolist()
    eyes = env.env._envs[0].total  # the first sum; vectors come before numbers
    assert sorted(shown[:3]) == sorted([eyes, float(eyes > 2), float(eyes > 4)])
    assert shown[3] == eyes
    pixels = batch(partial(CartPole, spec=Bounded(0, 255, (3, 8, 8), dtype=torch.uint8)))
    assert pixels.seen_space == spaces.Box(0, 255, (3, 8, 8), np.uint8)


def test_a_batch_draws_from_a_generator_of_its_own() -> None:
    """It seeds torch's global one; the policy's noise must not know, nor the batch beside it."""
    torch.manual_seed(5)
    noise = torch.randn(3)
    action = np.zeros((2, 2), np.float32)
    alone, first, second = (batch(Dice) for _ in range(3))
    expected = [alone.reset(None).copy(), *(alone.step(action)[0].copy() for _ in range(4))]
    torch.manual_seed(5)
    found = [first.reset(None).copy()]
    second.seed(2)
    second.reset(None)
    for _ in range(4):
        found.append(first.step(action)[0].copy())
        second.step(action)
    np.testing.assert_array_equal(found, expected)
    assert torch.equal(torch.randn(3), noise)


@pytest.mark.parametrize("terminal", [True, False])
def test_an_end_that_is_not_terminal_is_a_truncation(terminal: bool) -> None:
    class Ends(Dice):
        def _step(self, tensordict: TensorDict) -> TensorDict:
            ended = {"done": torch.tensor([True]), "terminated": torch.tensor([terminal])}
            return super()._step(tensordict).update(ended)

    env = batch(Ends)
    env.reset(None)
    ends = env.step(np.zeros((2, 2), np.float32))[2:4]
    assert [each.tolist() for each in ends] == [[terminal] * 2, [not terminal] * 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (CartPole, ""),
        (Pendulum, ""),
        (
            partial(CartPole, more="truncated"),
            "torchrl's check_env_specs refuses the specs: AssertionError: The keys of the specs",
        ),
        (
            partial(CartPole, spec=Unbounded(4, dtype=torch.float64)),
            "its spec requires torch.float64",
        ),
    ],
)
def test_results_that_do_not_fit_the_specs_are_named(make, said: str, capfd) -> None:
    env = batch(make)
    if not said:
        env.trial()
    else:
        with pytest.raises(Misfit, match=re.escape(said)):
            env.trial()
    assert capfd.readouterr() == ("", "")


def test_a_key_that_is_missing_later_ends_the_run_in_a_line() -> None:
    env = copies(partial(Pendulum), 2)
    env.reset_native()
    env.simulators.env._step = lambda data: TensorDict(
        {"reward": torch.zeros(2, 1), "done": data["done"], "terminated": data["done"]}, [2]
    )
    with pytest.raises(EnvError, match="env.target=own: step 1: observation has no "):
        env.step_native(np.zeros((2, 1), np.float32))
