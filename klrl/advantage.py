"""Advantages of a rollout, once per rollout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.objectives.value import GAE

from klrl.config import AdvantageConfig

#: The reward as the learner sees it: shaped, then scaled. What is recorded is never scaled.
LEARNER_REWARD = "reward_learner"


def make_advantage(
    config: AdvantageConfig, critic: TensorDictModule, reward_scale: float
) -> Callable[[TensorDictBase], TensorDictBase]:
    """TorchRL's GAE over the shaped and scaled reward.

    Truncated episodes are bootstrapped from ``("next", "observation")``, the last observation that
    the environment returned; terminated ones are not.

    Args:
        config: the advantage group.
        critic: observation -> ``state_value``.
        reward_scale: factor on the shaped reward.

    Returns:
        A function that writes ``advantage``, ``value_target`` and ``state_value`` [N, T, 1].
    """
    gae = GAE(gamma=config.gamma, lmbda=config.lmbda, value_network=critic, average_gae=False)
    gae.set_keys(reward=LEARNER_REWARD)

    @torch.no_grad()
    def estimate(batch: TensorDictBase) -> TensorDictBase:
        batch.set(("next", LEARNER_REWARD), batch.get(("next", "reward")) * reward_scale)
        return gae(batch)

    return estimate
