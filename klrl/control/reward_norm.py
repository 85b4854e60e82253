"""The running scale of rewards (``env.normalize_reward``), for the learner alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd
from torch import Tensor

#: Beside the variance, as in Gymnasium.
_EPSILON = 1e-8


class RewardNormalizer:
    """1 / std of the discounted sum of past rewards, G_t = r_t + gamma G_t-1.

    What ``gymnasium.wrappers.vector.NormalizeReward`` divides by (Engstrom et al. 2020, "reward
    scaling"), with two differences: one factor for all frames of a rollout, its own included, so
    that an advantage adds up rewards of one unit; and no G across the end of an episode, truncated
    or not. The mean stays in the rewards.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma, self._moments = gamma, RunningMeanStd()
        self._sums: list[float] = []  # gamma G of each row's last frame, 0 after an episode's end
        self._begun = False
        self.scale = 1.0  # until a rollout has a reward other than 0

    def update(self, reward: Tensor, done: Tensor) -> float:
        """The factor for a rollout, taken in: rewards and ends of episodes [N, T, 1].

        Row n goes on where row n of the rollout before ended.
        """
        rows = reward[..., 0].tolist()
        if len(self._sums) != len(rows):  # the first one
            self._sums = [0.0] * len(rows)
        decays = (self._gamma * (~done[..., 0]).double()).tolist()
        if not self._begun and not reward.any():
            return self.scale  # nothing to measure yet; 1 / std would grow without bounds
        self._begun = True
        sums = [_discounted(*of) for of in zip(rows, decays, self._sums, strict=True)]
        self._sums = [of[-1] * decay[-1] for of, decay in zip(sums, decays, strict=True)]
        self._moments.update(np.array(sums).ravel())
        self.scale = float(1 / np.sqrt(self._moments.var + _EPSILON))
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Mean, variance, count, and the sums of running episodes."""
        moments = self._moments
        return {
            "mean": float(moments.mean),
            "var": float(moments.var),
            "count": float(moments.count),
            "scale": self.scale,
            "begun": self._begun,
            "sums": list(self._sums),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._moments.mean, self._moments.var = np.float64(state["mean"]), np.float64(state["var"])
        self._moments.count, self.scale = float(state["count"]), float(state["scale"])
        self._begun = bool(state["begun"])
        self._sums = list(state["sums"])

    def begin_episodes(self) -> None:
        """Forget the sums: all rows begin new episodes."""
        self._sums = []


def _discounted(rewards: list[float], decays: list[float], before: float) -> list[float]:
    """G_t = r_t + decay_t-1 G_t-1 [T] of one copy; decay is 0 at the end of an episode."""
    pairs = zip(rewards[1:], decays, strict=False)
    return list(accumulate(pairs, lambda g, x: x[0] + x[1] * g, initial=rewards[0] + before))
