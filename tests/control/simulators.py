"""Simulators that step together, of libraries' kinds, for ``env.target``."""

import functools
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv

from klrl.control.env.pendulum import Pendulum


class Ends(gymnasium.Env):
    """Shows [its number of steps, a draw]; terminates after 3 steps, or is truncated after 5."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.last = 0, int(self.np_random.choice([3, 5]))
        return self.seen(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.last
        return self.seen(), 1.0 + self.steps, over and self.last == 3, over and self.last == 5, {}

    def seen(self) -> np.ndarray:
        return np.array([self.steps, self.np_random.normal()], np.float32)


class Counted(Ends):
    """Shows its number of steps, counted from 2; takes two numbers, from 1 and -1."""

    observation_space = gymnasium.spaces.Discrete(6, start=2)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2], start=[1, -1])

    def step(self, action):
        assert self.action_space.contains(action), action
        seen, _, *ends = super().step(action)
        return seen, float(action[0] + 10 * action[1]), *ends

    def seen(self) -> int:
        return self.steps + 2


gymnasium.register("klrl-test/Ends-v0", Ends)
gymnasium.register("klrl-test/Counts-v0", Counted)


def sync(
    num_envs: int, mode: str = "SAME_STEP", id: str = "klrl-test/Ends-v0", copy: bool = True
) -> SyncVectorEnv:
    make = functools.partial(gymnasium.make, id)
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode[mode], copy=copy)


class Dropping(SyncVectorEnv):
    """A library that drops last observations."""

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        info.pop("final_obs", None)
        return (*results, info)


class Forgetting(SyncVectorEnv):
    """A library that drops the last observations of truncated episodes alone."""

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        if results[3].any():
            info.pop("final_obs")
        return (*results, info)


def dropping(num_envs: int) -> Dropping:
    make = functools.partial(gymnasium.make, "klrl-test/Ends-v0")
    return Dropping([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class Views(SyncVectorEnv):
    """A library whose observations are reversed views that nobody may write to."""

    def __init__(self, num_envs: int) -> None:
        make = functools.partial(gymnasium.make, "klrl-test/Ends-v0")
        super().__init__([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    def reset(self, **how: Any) -> Any:
        seen, info = super().reset(**how)
        return self._view(seen), info

    def step(self, actions: Any) -> Any:
        seen, *results = super().step(actions)
        return (self._view(seen), *results)

    @staticmethod
    def _view(seen: np.ndarray) -> np.ndarray:
        view = seen[:, ::-1]
        view.flags.writeable = False
        return view


class Pool(SyncVectorEnv):
    """The interface of EnvPool: NEXT_STEP, ``reset(ids)`` that returns these copies alone."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how, autoreset_mode=AutoresetMode.DISABLED)
        self.metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP

    def reset(self, env_id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        assert seed is None
        if env_id is None:
            return super().reset(seed=7)
        mask = np.isin(np.arange(self.num_envs), env_id)
        return super().reset(options={"reset_mask": mask})[0][mask], {}


def pool(num_envs: int, id: str = "klrl-test/Ends-v0") -> Pool:
    return Pool([functools.partial(gymnasium.make, id)] * num_envs)


@functools.cache
def once(num_envs: int = 4) -> SyncVectorEnv:
    return sync(num_envs)


class NaNEnds(Pendulum):
    """Like IsaacLabWrapper with its own resets: last observations are NaN."""

    max_episode_steps = 10

    @classmethod
    def _step(cls, tensordict: TensorDict) -> TensorDict:
        after = Pendulum._step(tensordict)
        over = after["steps"] >= cls.max_episode_steps
        for key in ("observation", "th", "thdot"):
            value = after[key]
            after[key] = value.where(~over.reshape(over.shape[: value.ndim]), torch.nan)
        return after.update({"done": over, "truncated": over})


class Diverging(Pendulum):
    """Copy 1 diverges in its third step."""

    @classmethod
    def _step(cls, tensordict: TensorDict) -> TensorDict:
        after = Pendulum._step(tensordict)
        bad = (after["steps"][:, 0] == 3) & (torch.arange(len(after["th"])) == 1)
        return after.set("observation", after["observation"].where(~bad[:, None], torch.nan))


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def four(render_mode: str | None = None) -> SyncVectorEnv:
    return sync(4)


class Deaf(SyncVectorEnv):
    """Resets all copies, whatever the mask."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed)


class Numbered(SyncVectorEnv):
    """Says 0 and 1 in place of False and True."""

    def step(self, actions: Any) -> Any:
        seen, reward, terminated, truncated, info = super().step(actions)
        return seen, reward, terminated.astype(int), truncated.astype(int), info


def again(num_envs: int = 4) -> gymnasium.vector.VectorWrapper:
    """A new wrapper of simulators that exist once."""
    return RecordEpisodeStatistics(once(num_envs=4))


class Walk(EnvBase):
    """Shows its number of steps; is truncated after 7."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(1))
        self.action_spec, self.reward_spec = Bounded(-1, 1, (1,)), Unbounded(1)

    def _set_seed(self, seed: int | None) -> None:
        """Draws nothing."""

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        self.steps = 0
        return TensorDict({"observation": torch.zeros(1)})

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.steps += 1
        seen = {"observation": torch.tensor([float(self.steps)]), "reward": torch.ones(1)}
        ends = {"done": torch.tensor([self.steps == 7]), "terminated": torch.tensor([False])}
        return TensorDict({**seen, **ends})


@functools.cache
def walk() -> Walk:
    return Walk()
