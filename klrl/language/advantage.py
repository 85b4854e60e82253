"""Advantages of a language rollout, once per rollout: against its group, or GAE per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase

from klrl.config import AdvantageConfig, GroupConfig, LanguageConfig
from klrl.kl.charge import ReferenceKL, on_last, to_go, weighted_reward
from klrl.language.baselines import group_advantage, token_gae
from klrl.language.batch import REWARD, SCORE, response_mask
from klrl.language.kl import CHARGED
from klrl.language.policy import Policy
from klrl.language.rollout import STATES

Advantage = Callable[[TensorDictBase], TensorDictBase]


def gae(config: LanguageConfig, policy: Policy, kl: ReferenceKL | None) -> Advantage:
    """``advantage=gae``: per token, against the value head.

    Returns:
        A function that writes ``advantage``, ``value_target`` and ``state_value``, [B, R, 1] each.
    """
    advantage, value_head = config.advantage, policy.value_head
    assert isinstance(advantage, AdvantageConfig)
    assert value_head is not None

    @torch.no_grad()
    def estimate(batch: TensorDictBase) -> TensorDictBase:
        mask, charged = response_mask(batch), batch[REWARD]
        raw = on_last(batch[SCORE].flatten().to(charged), mask).unsqueeze(-1)
        reward = weighted_reward(charged, raw, advantage.reward_weight)
        # The states are the sampling policy's, so this is the value before the update.
        value = value_head(batch[STATES], mask).to(reward)
        batch["advantage"], batch["value_target"] = token_gae(
            reward, value, mask, advantage.gamma, advantage.lmbda
        )
        batch["state_value"] = value.unsqueeze(-1)
        return batch

    return estimate


def group(config: LanguageConfig, policy: Policy, kl: ReferenceKL | None) -> Advantage:
    """``advantage=group``: against the other responses to the prompt.

    Returns:
        A function that writes ``advantage`` [B, R, 1].
    """
    assert isinstance(config.advantage, GroupConfig)
    baseline, weight = config.advantage.baseline, config.advantage.reward_weight
    group_size = config.collector.group_size

    @torch.no_grad()
    def estimate(batch: TensorDictBase) -> TensorDictBase:
        mask, score = response_mask(batch), batch[SCORE].flatten()
        charged, coef = torch.zeros(mask.shape, device=score.device), 0.0
        if kl is not None:
            charged, coef = to_go(batch[CHARGED].squeeze(-1), mask, kl.placement), kl.coef
        batch["advantage"] = group_advantage(
            score, group_size, baseline, charged, mask, coef, weight
        )
        return batch

    return estimate
