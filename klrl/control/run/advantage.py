"""Estimate generalised advantages, once per rollout; normalise rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from klrl.config import AdvantageConfig
from klrl.control.env.simulators import Native, functions, native
from klrl.control.policy.networks import Agent
from klrl.kl.charge import RAW_REWARD_KEY, weighted_reward

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
        batch.set("advantage", advantage)
        take_excess(batch, reward_scale, normalizer)
        return batch

    return estimate


def take_excess(
    batch: TensorDictBase, reward_scale: float, normalizer: RewardNormalizer | None
) -> None:
    """Take any :data:`EXCESS` from the advantages [N, T, 1] of a rollout."""
    if (excess := batch.get(EXCESS, None)) is not None:
        scale = reward_scale * (1.0 if normalizer is None else normalizer.scale)
        batch.set("advantage", batch.get("advantage") + scale * excess)


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
        steps = batch.get("step_count", None)  # of the episode so far
        begins = None if steps is None else steps[:, 0, 0] == 0
        reward = reward * normalizer.update(reward, after.get("done"), begins)
    return reward


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
    deltas, decays = by_time(delta), by_time(decay)
    last = functions(deltas).zeros_like(deltas[0])
    sums = sums_over_time(deltas, decays, last, backwards=True)
    return torch.as_tensor(sums).T.contiguous().unsqueeze(-1).to(delta)


def by_time(values: Tensor) -> Native:
    """Convert a rollout's numbers [N, T, 1] to float64 [T, N], for :func:`sums_over_time`.

    They stay on a device only if there are more copies than steps: each step waits for the last.
    """
    where = values.device if len(values) > values.shape[1] else "cpu"
    return native(values[..., 0].T.to(where, torch.float64).contiguous())


#: With fewer copies, Python's floats cost less than vectors: .11 us a number, against 1 us a step.
FEW = 9


def sums_over_time(
    values: Native, decays: Native, before: Native, *, backwards: bool = False
) -> Native:
    """Compute S_t = value_t + decay_t S_{t-1} [T, N], where S_{-1} is ``before`` [N].

    Time runs from T - 1 to 0 if ``backwards``.
    """
    xp, way = functions(values), -1 if backwards else 1
    sums = xp.empty_like(values)
    if len(before) < FEW and xp is np:
        for n, last in enumerate(before.tolist()):
            pairs = zip(*(x[:, n].tolist()[::way] for x in (values, decays)), strict=True)
            sums[::way, n] = [last := value + decay * last for value, decay in pairs]
        return sums
    rows, add, multiply = (list(x)[::way] for x in (values, decays, sums)), xp.add, xp.multiply
    for value, decay, out in zip(*rows, strict=True):
        before = add(value, multiply(decay, before, out=out), out=out)
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

    def update(self, reward: Tensor, done: Tensor, begins: Tensor | None = None) -> float:
        """Add a rollout's rewards and ends of episodes [N, T, 1]; return the rollout's factor.

        Row n must contain the steps that follow row n of the previous rollout, unless ``begins``
        [N] says that it begins an episode.
        """
        rewards = by_time(reward)
        if len(self._sums) != len(reward):  # the first rollout, or after begin_episodes()
            self._sums = [0.0] * len(reward)
        if begins is not None:
            self._sums = [g * (not new) for g, new in zip(self._sums, begins.tolist(), strict=True)]
        if not self._begun and not reward.any():
            return self.scale  # with rewards of 0 only, the factor would rise to 1e4
        self._begun = True
        xp, decays = functions(rewards), self._gamma * by_time(~done)
        before = xp.asarray(self._sums, dtype=xp.float64, device=rewards.device)
        first = xp.ones_like(rewards[:1])  # of the sums before each frame
        sums = sums_over_time(rewards, xp.concatenate([first, decays[:-1]]), before)
        self._sums = (sums[-1] * decays[-1]).tolist()
        every = sums.T.ravel()
        mean = float(every.mean())
        var = float(((every - mean) ** 2).mean())
        self._moments.update_from_moments(mean, var, len(every))
        self.scale = float(1 / np.sqrt(self._moments.var + _EPSILON))
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, the factor and the sums of running episodes."""
        moments = {key: float(value) for key, value in vars(self._moments).items()}
        own = {"scale": self.scale, "begun": self._begun, "sums": list(self._sums)}
        return {**moments, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state."""
        for key in vars(self._moments):
            setattr(self._moments, key, np.float64(state[key]))
        self.scale, self._begun = float(state["scale"]), bool(state["begun"])
        self._sums = [float(each) for each in state["sums"]]

    def begin_episodes(self) -> None:
        """Clear the sums of running episodes, since all rows begin new episodes."""
        self._sums = []
