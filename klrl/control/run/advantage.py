"""Estimate generalised advantages, once per rollout; normalise rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from klrl.config import AdvantageConfig, CustomAdvantageConfig
from klrl.config.own import PartError, try_part
from klrl.control.policy.networks import Agent
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY, weighted_reward

#: Key of the charge in a step's reward that its own advantage must not contain [N, T, 1], if any.
EXCESS = ("sampler", "excess")


def gae(
    config: AdvantageConfig,
    critic: TensorDictModule,
    reward_scale: float,
    normalizer: RewardNormalizer | None = None,
    agent: Agent | None = None,
) -> Callable[[TensorDictBase], TensorDictBase]:
    """Make the function that estimates generalised advantages (Schulman et al. 2016).

    The returned function writes ``advantage``, ``value_target`` and ``state_value`` [N, T, 1]. It
    bootstraps truncated episodes from ``("next", "observation")``, their last observation; it does
    not bootstrap terminated episodes.

    TorchRL's GAE takes up to a sixth of an iteration's time: it evaluates the critic at both ends
    of every transition, and builds padded trajectories. Here the value after a step is the next
    step's value; the critic is evaluated again only where an episode or the rollout ends.
    """
    value_of = critic.module

    @torch.no_grad()
    def estimate(batch: TensorDictBase) -> TensorDictBase:
        after = batch.get("next")
        reward = learned_reward(batch, config, reward_scale, normalizer)
        value = value_of(batch.get("observation"))
        value_after = _values_after(batch, value, value_of)
        alive = (~after.get("terminated")).to(value.dtype)
        continues = (~after.get("done")).to(value.dtype)
        delta = reward + config.gamma * alive * value_after - value
        advantage = discounted(delta, config.gamma * config.lmbda * continues)
        if config.reward_weight == 0 and not reward.any():  # else the critic's errors are learned
            advantage = torch.zeros_like(advantage)
        batch.set("state_value", value)
        batch.set("value_target", advantage + value)
        if (excess := batch.get(EXCESS, None)) is not None:
            scale = reward_scale * (1.0 if normalizer is None else normalizer.scale)
            advantage = advantage + scale * excess
        batch.set("advantage", advantage)
        return batch

    return estimate


def learned_reward(
    batch: TensorDictBase,
    config: AdvantageConfig,
    reward_scale: float,
    normalizer: RewardNormalizer | None = None,
) -> Tensor:
    """Weight and scale a rollout's rewards [N, T, 1] for the learner, after the KL charge.

    Args:
        batch: a rollout; its recorded rewards are not changed.
        config: the settings of the advantage; only ``reward_weight`` is read.
        reward_scale: factor on the weighted reward.
        normalizer: gives a second factor. Each call updates it, so call this once per rollout.
    """
    after = batch.get("next")
    charged = after.get("reward")
    raw = after.get(RAW_REWARD_KEY, charged)
    reward = weighted_reward(charged, raw, config.reward_weight) * reward_scale
    if normalizer is not None:
        reward = reward * normalizer.update(reward, after.get("done"))
    return reward


def custom(
    config: CustomAdvantageConfig,
    critic: TensorDictModule,
    reward_scale: float,
    normalizer: RewardNormalizer | None,
    agent: Agent,
) -> OwnAdvantage:
    """``advantage=custom``: make the user's function, and try it on a synthetic rollout."""
    given = {
        "config": config,
        "critic": critic,
        "reward_scale": reward_scale,
        "normalizer": normalizer,
    }
    follower = deepcopy(normalizer)
    trial, use = {"normalizer": lambda: follower}, partial(_try, agent)
    return OwnAdvantage(*try_part("advantage", config, given, object, use, trial=trial))


@dataclass(frozen=True)
class OwnAdvantage:
    """Wrapper of the user's function that writes the advantages of a rollout."""

    part: Any  # saved in checkpoints if it has state_dict and load_state_dict
    unsaved: bool  # whether ``part`` has state that no checkpoint saves

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the advantages of a rollout."""
        self.part(batch)
        return batch


@torch.no_grad()
def _try(agent: Agent, estimate: Callable[[TensorDictBase], object]) -> None:
    """Call the user's function on a synthetic rollout [2, 3], and check what it writes."""
    estimate(batch := _made_up(agent))
    for key in ("advantage", "value_target", "state_value"):
        value = batch.get(key, None)
        if value is None:
            raise PartError(f"wrote no {key}; write it into the rollout, [N, T, 1]")
        if value.shape != (2, 3, 1) or value.dtype != torch.float32:
            raise PartError(
                f"wrote {key} of shape {tuple(value.shape)}, {value.dtype}; give [N, T, 1] = "
                "(2, 3, 1), float32"
            )
        if not value.isfinite().all():
            raise PartError(f"wrote values of {key} that are not finite")


def _made_up(agent: Agent) -> TensorDictBase:
    """Make a synthetic rollout [2, 3], with a terminated and a truncated episode."""
    generator = torch.Generator().manual_seed(0)
    like = next(agent.critic.parameters())
    seen = agent.synthetic_observations(12).reshape(2, 2, 3, -1)

    def normal() -> Tensor:
        return torch.randn(2, 3, 1, generator=generator).to(like)

    terminated, truncated = (torch.zeros(2, 3, 1, dtype=torch.bool) for _ in range(2))
    terminated[0, 1], truncated[1, 0] = True, True
    no, steps = torch.zeros_like(terminated), torch.tensor([[1, 2, 1], [1, 1, 2]])[..., None]
    after = {
        "observation": seen[1],
        **{key: normal() for key in ("reward", RAW_REWARD_KEY, KL_KEY, "episode_reward")},
        "step_count": steps,
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    root = {
        "observation": seen[0],
        **dict.fromkeys(("done", "terminated", "truncated"), no),
        "episode_reward": normal(),
        "step_count": steps - 1,
        "collector": {"traj_ids": torch.tensor([[0, 0, 2], [1, 3, 3]])},
        "next": after,
    }
    acted: TensorDictBase = agent.actor(TensorDict(root, [2, 3], device=like.device))
    return acted


def _values_after(
    batch: TensorDictBase, value: Tensor, value_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return V(s_{t+1}) [N, T, 1]; call ``value_of`` only where an episode or the rollout ends."""
    ends = batch.get(("next", "done"))[..., 0].clone()
    ends[:, -1] = True
    after = value.roll(-1, dims=1)
    after[ends] = value_of(batch.get(("next", "observation"))[ends])
    return after


def discounted(delta: Tensor, decay: Tensor) -> Tensor:
    """Compute A_t = delta_t + decay_t A_{t+1} backwards over T; tensors are [N, T, 1]."""
    deltas, decays = _by_time(delta), _by_time(decay)
    sums = _sums(deltas[::-1], decays[::-1], np.zeros(len(delta)))[::-1]
    return torch.from_numpy(sums.T.copy()).unsqueeze(-1).to(delta)


def _by_time(values: Tensor) -> np.ndarray:
    """Convert a rollout's numbers [N, T, 1] to float64 [T, N]."""
    array: np.ndarray = values[..., 0].T.to("cpu", torch.float64).contiguous().numpy()
    return array


def _sums(values: np.ndarray, decays: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Compute S_t = value_t + decay_t S_{t-1} [T, N], where S_{-1} is ``before`` [N].

    A loop over time with a vector per step: a loop over the numbers takes 100 times as long for
    4,096 copies of 24 steps, and as long as this one for 8 copies.
    """
    sums = np.empty_like(values)
    for value, decay, out in zip(values, decays, sums, strict=True):
        before = np.add(value, np.multiply(decay, before, out=out), out=out)
    return sums


# --------------------------------------------------------------------- the running scale of rewards

#: Added to the variance, as in Gymnasium.
_EPSILON = 1e-8


class RewardNormalizer:
    """Running factor 1 / std(G) for rewards r, with the discounted sum G_t = r_t + gamma G_{t-1}.

    ``gymnasium.wrappers.vector.NormalizeReward`` (Engstrom et al. 2020, "reward scaling") differs
    in two ways: its factor changes within a rollout, and with Gymnasium's default autoreset its G
    continues after a truncated episode. Here a rollout is first added to the statistics; then all
    its rewards get the same factor, so that an advantage sums rewards of one scale.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma, self._moments = gamma, RunningMeanStd()
        self._sums: list[float] = []  # per row: gamma G of the last frame; 0 if an episode ended
        self._begun = False
        self.scale = 1.0  # stays 1 until a rollout has a reward other than 0

    def update(self, reward: Tensor, done: Tensor) -> float:
        """Add a rollout's rewards and ends of episodes [N, T, 1]; return the rollout's factor.

        Row n must contain the steps that follow row n of the previous rollout.
        """
        rewards = _by_time(reward)
        if len(self._sums) != len(reward):  # the first rollout, or after begin_episodes()
            self._sums = [0.0] * len(reward)
        if not self._begun and not reward.any():
            return self.scale  # with rewards of 0 only, the factor would rise to 1e4
        self._begun = True
        decays = np.ones((len(rewards) + 1, len(reward)))  # of the sums before each frame
        decays[1:] = self._gamma * _by_time(~done)
        sums = _sums(rewards, decays[:-1], np.array(self._sums))
        self._sums = (sums[-1] * decays[-1]).tolist()
        self._moments.update(sums.T.ravel())
        self.scale = float(1 / np.sqrt(self._moments.var + _EPSILON))
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, the factor and the sums of running episodes."""
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
        """Load a checkpoint's state."""
        self._moments.mean, self._moments.var = np.float64(state["mean"]), np.float64(state["var"])
        self._moments.count, self.scale = float(state["count"]), float(state["scale"])
        self._begun = bool(state["begun"])
        self._sums = [float(each) for each in state["sums"]]

    def begin_episodes(self) -> None:
        """Clear the sums of running episodes, since all rows begin new episodes."""
        self._sums = []
