"""Tiny environments of every space, whose optimal return is known; ids ``klrl-test/...``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ACTIONS = {
    "from_five": spaces.Discrete(3, start=5),
    "multi_discrete": spaces.MultiDiscrete([3, 2, 4], start=[0, 1, -2]),
    "grid": spaces.MultiDiscrete([[2, 3], [3, 2]]),
    "multi_binary": spaces.MultiBinary(3),
    "bits": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "number": spaces.Box(-1, 1, (), np.float32),
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


def register() -> None:
    """Register the ids, once."""
    for name, entry in IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry)


IDS = {"klrl-test/Copying-v0": Copying}
register()
