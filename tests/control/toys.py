"""Tiny environments of every space, whose optimal return is known; ids ``klrl-test/...``."""

import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from klrl.control.env.observation import Layout

ACTIONS = {
    "from_five": spaces.Discrete(3, start=5),
    "multi_discrete": spaces.MultiDiscrete([3, 2, 4], start=[0, 1, -2]),
    "grid": spaces.MultiDiscrete([[2, 3], [3, 2]]),
    "multi_binary": spaces.MultiBinary(3),
    "bits": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "number": spaces.Box(-1, 1, (), np.float32),
}


def unpacked(layout: Layout, packed: np.ndarray) -> dict[str, np.ndarray]:
    """The entries [..., *shape] of transports [..., D], by their keys; numbers from 0 on."""
    return {
        entry.key: packed[..., place].reshape((*packed.shape[:-1], *entry.shape))
        for entry, place in layout.places()
    }


class Copying(gymnasium.Env):
    """Shows an action of its space, and pays the share of it that is repeated; 8 steps, at most 8.

    The observation is the action counted from 0, one number each, in a Box of two dimensions.

    Args:
        action: the action space, a key of :data:`ACTIONS`.
    """

    steps = 8

    def __init__(self, action: str = "multi_discrete") -> None:
        self.action_space = ACTIONS[action]
        self._start = getattr(self.action_space, "start", 0)
        self.observation_space = spaces.Box(-1, 5, (1, self._size), np.float64)
        self.given: list[Any] = []

    @property
    def _size(self) -> int:
        return int(np.prod(self.action_space.shape))

    def _show(self) -> np.ndarray:
        self._target = self.action_space.sample()
        shown = np.asarray(self._target - self._start, np.float64)
        return shown.reshape(self.observation_space.shape)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self._step = 0
        return self._show(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.given.append(action)
        if isinstance(self.action_space, spaces.Box):
            reward = 1 - float(np.abs(action - self._target).mean())
        else:
            reward = float(np.mean(np.asarray(action) == self._target))
        self._step += 1
        return self._show(), reward, self._step == self.steps, False, {}


class Keyed(gymnasium.Env):
    """Shows what to do under a key of every kind, and pays 1 where it is done; 8 steps.

    The action to take is (number + turned + bright) mod 3, counted from 0: a policy that leaves out
    a key cannot know it.

    Args:
        as_tuple: the same in a Tuple, nested.
        image: whether ``bright`` is the brightness of an image, else a number.
    """

    steps = 8
    action_space = spaces.Discrete(3)

    def __init__(self, as_tuple: bool = False, image: bool = True) -> None:
        self._as_tuple, self._image = as_tuple, image
        bright = (
            spaces.Box(0, 255, (8, 8, 3), np.uint8)
            if image
            else spaces.Box(0, 1, (2, 2), np.float64)
        )
        number, turned = spaces.Discrete(4, start=3), spaces.MultiBinary(1)
        self.observation_space = (
            spaces.Tuple([bright, spaces.Tuple([number, turned])])
            if as_tuple
            else spaces.Dict(bright=bright, inner=spaces.Dict(number=number, turned=turned))
        )

    def _show(self) -> Any:
        number, turned, bright = (int(self.np_random.integers(k)) for k in (4, 2, 2))
        self._right = (number + turned + bright) % 3
        shown = (
            np.full((8, 8, 3), 255 * bright, np.uint8)
            if self._image
            else np.full((2, 2), 1.0 * bright)
        )
        inner = (number + 3, np.array([turned], np.int8))
        if self._as_tuple:
            return shown, inner
        return {"bright": shown, "inner": dict(zip(("number", "turned"), inner, strict=True))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._show(), {}

    def step(self, action):
        reward = float(action == self._right)
        self._step += 1
        return self._show(), reward, self._step == self.steps, False, {}


class Counted(gymnasium.Env):
    """Shows a number, and pays 1 if the action is the number mod 3; 8 steps.

    Args:
        many: how many numbers there are.
        board: whether they are shown as planes [5, 5, many] of 0 and 1, one of them full.
    """

    action_space = spaces.Discrete(3)

    def __init__(self, many: int = 5000, board: bool = False) -> None:
        self.many, self.board = many, board
        self.observation_space = spaces.Discrete(many)
        if board:
            self.observation_space = spaces.Box(0, 1, (5, 5, many), np.uint8)

    def _show(self) -> Any:
        self._number = int(self.np_random.integers(self.many))
        if not self.board:
            return self._number
        return np.broadcast_to(
            np.arange(self.many, dtype=np.uint8) == self._number, (5, 5, self.many)
        ).astype(np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._show(), {}

    def step(self, action):
        reward, self._step = float(action == self._number % 3), self._step + 1
        return self._show(), reward, self._step == 8, False, {}


class Masked(gymnasium.Env):
    """Excluded actions end the episode with -1, others pay their number; 8 steps.

    In every state one of the two halves of the actions is excluded, which only the mask says. The
    largest return is 8 steps of 4 or 5, 36 on average.

    Args:
        where: of the mask: observation, info, or both halves of a MultiDiscrete (``several``).
        strict: raise at an excluded action.
    """

    steps = 8
    count = 6

    def __init__(self, where: str = "observation", strict: bool = False) -> None:
        self._where, self._strict = where, strict
        several = where == "several"
        self.action_space = spaces.MultiDiscrete([6, 6]) if several else spaces.Discrete(6)
        plain = spaces.Box(-1, 1, (2,), np.float32)
        size = 12 if several else 6
        self.observation_space = (
            plain
            if where == "info"
            else spaces.Dict(observation=plain, action_mask=spaces.MultiBinary(size))
        )

    def _result(self) -> tuple[Any, dict[str, Any]]:
        halves = 2 if self._where == "several" else 1
        self._mask = np.zeros((halves, 6), np.int8)
        for row in self._mask:
            first = int(self.np_random.integers(2))
            row[first::2] = 1
        if self._step == self.steps:
            self._mask[:] = 0
        shown = np.zeros(2, np.float32)
        mask = self._mask.reshape(-1).copy()
        if self._where == "info":
            return shown, {"action_mask": mask}
        return {"observation": shown, "action_mask": mask}, {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._result()

    def step(self, action):
        actions = np.atleast_1d(action)
        allowed = all(row[a] for row, a in zip(self._mask, actions, strict=True))
        assert allowed or not self._strict, action
        reward = float(actions.mean()) if allowed else -1.0
        self._step += 1
        observation, info = self._result()
        return observation, reward, self._step == self.steps or not allowed, False, info


class Drifting(gymnasium.Env):
    """A counter that drifts at random, and ends above 30; nobody can read or write its state."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(3)
    drift = 1.0

    def noise(self) -> float:
        return self.drift * float(self.np_random.normal())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.steps = self.noise(), 0
        return np.array([self.position]), {}

    def step(self, action):
        self.position += int(action) + self.noise()
        self.steps += 1
        return np.array([self.position]), self.position, self.position > 30, False, {}


class Unseeded(Drifting):
    """Its noise comes from the operating system."""

    def noise(self) -> float:
        return random.SystemRandom().random()


class Bounded(Drifting):
    """Its action is a number from -most to most; 8 steps."""

    def __init__(self, most: float = 1.0) -> None:
        self.action_space = spaces.Box(-most, most, (1,), np.float32)

    def step(self, action):
        observation, reward, *_ = super().step(int(action[0]))
        return observation, reward, self.steps == 8, False, {}


class Warming(gymnasium.ObservationWrapper):
    """Observations grow with each."""

    seen = 0

    def observation(self, observation):
        self.seen += 1
        return observation * np.float32(1 + self.seen / 1000)


def frozen() -> gymnasium.Env:
    """A wrapper whose statistics are known and stay."""
    env = gymnasium.wrappers.NormalizeObservation(Drifting())
    env.update_running_mean = False
    env.obs_rms.var = np.float32([4 - 1e-8])
    return env


class Dice(gymnasium.Env):
    """Starts and pays by throws of the global ``random`` and ``np.random``; 8 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.array([random.gauss(0, 1)], np.float32), {}

    def step(self, action):
        self._step += 1
        seen = np.array([np.random.standard_normal()], np.float32)
        return seen, random.random(), self._step == 8, False, {}


def register() -> None:
    """Register the ids, once."""
    for name, entry in IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry)


IDS = {
    "klrl-test/Copying-v0": Copying,
    "klrl-test/Counted-v0": Counted,
    "klrl-test/Keyed-v0": Keyed,
    "klrl-test/Masked-v0": Masked,
}
register()
