"""Computes the advantages of a language rollout: relative to the group, or GAE per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from klrl.base.errors import ConfigError
from klrl.config import AdvantageConfig, GroupConfig, LanguageConfig
from klrl.config.objectives import BASELINES as DECLARED
from klrl.config.objectives import SHAPED
from klrl.kl.charge import ReferenceKL, on_last, shaped, to_go, weighted_reward
from klrl.language.data.batch import REWARD, SCORE, response_mask
from klrl.language.run.kl import CHARGED, EXCESS
from klrl.language.run.load import Policy
from klrl.language.run.rollout import STATES

#: A group's std below this share of its largest |score| is a rounding error, and counts as 0.
_NO_SPREAD = 1e-6


Baseline = Callable[[Tensor, int], Tensor]
#: ``advantage.baseline`` -> a function of scores [B] and G that compares each with its group, [B].
BASELINES: dict[str, Baseline] = {}


def baseline(*names: str) -> Callable[[Baseline], Baseline]:
    """Register a function under these names of ``advantage.baseline``."""

    def add(function: Baseline) -> Baseline:
        BASELINES.update(dict.fromkeys(names, function))
        return function

    return add


@baseline("normalized", SHAPED)
def group_normalized(score: Tensor, group_size: int) -> Tensor:
    """(s_i - mean) / std over the G scores of a prompt (GRPO: Shao et al. 2024, section 4.1.2).

    std is :func:`group_spread`. A group whose scores are all equal gives 0; [B] -> [B].
    """
    std, flat = _spread(score, group_size)
    return (_centred(score, group_size) / std).masked_fill(flat, 0.0).flatten()


def group_spread(score: Tensor, group_size: int) -> Tensor:
    """Return the std of each response's group, with G - 1 in the denominator; [B] -> [B].

    The std is set to 1 if all scores of the group are equal, to avoid a division by 0.
    """
    return _spread(score, group_size)[0].repeat_interleave(group_size)


@baseline("mean")
def group_centred(score: Tensor, group_size: int) -> Tensor:
    """s_i minus the mean score of its group (Dr. GRPO: Liu et al. 2025), [B] -> [B]."""
    return _centred(score, group_size).flatten()


@baseline("leave_one_out")
def leave_one_out(score: Tensor, group_size: int) -> Tensor:
    """s_i minus the mean of the other scores of its group (RLOO: Kool et al. 2019), [B] -> [B].

    s_i - (sum s - s_i) / (G - 1) = G / (G - 1) (s_i - mean).
    """
    return (_centred(score, group_size) * group_size / (group_size - 1)).flatten()


def _centred(score: Tensor, group_size: int) -> Tensor:
    """Return each score minus the mean of its group, [N, G]."""
    groups = score.reshape(-1, group_size)
    return groups - groups.sum(1, keepdim=True) / group_size


def _spread(score: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return each group's std (1 if its scores are equal), and whether they are equal; [N, 1]."""
    squares = _centred(score, group_size).square().sum(1, keepdim=True)
    std = (squares / (group_size - 1)).sqrt()
    size = score.reshape(-1, group_size).abs().amax(1, keepdim=True)
    flat = std <= _NO_SPREAD * size.clamp_min(torch.finfo(score.dtype).tiny)
    return std.masked_fill(flat, 1.0), flat


for _name in BASELINES.keys() ^ DECLARED:
    raise ConfigError(
        f"advantage.baseline={_name}: declare it in klrl/config/objectives.py, and mark a function "
        "of klrl/language/run/advantage.py with @baseline and its name"
    )


def group_advantage(
    score: Tensor,
    group_size: int,
    baseline: str,
    kl_to_go: Tensor,
    mask: Tensor,
    coef: float | Tensor,
    weight: float = 1.0,
) -> Tensor:
    """A_t = weight * BASELINES[baseline](score) - coef * kl_to_go_t.

    ``normalized`` divides the score by the group's std, but not the KL: in units of the score, the
    KL's coefficient is then coef * std. ``normalized_shaped`` divides both by the std, so its
    advantage is the advantage of ``mean``, divided by the std.

    ``score`` [B] has one number per response, ``kl_to_go`` [B, R] nats from
    :func:`klrl.kl.charge.to_go`, 0 for placement=loss. ``group_size``: G, at least 2. ``coef``: of
    the KL. ``weight``: factor on the score after its baseline is subtracted.

    Returns:
        [B, R, 1], 0 at padding.
    """
    compared = weight * BASELINES[baseline](score, group_size)
    if baseline == SHAPED:
        kl_to_go = kl_to_go / group_spread(score, group_size)[:, None]
    advantage = shaped(compared[:, None].expand_as(kl_to_go), kl_to_go, coef)
    return advantage.masked_fill(~mask, 0.0).unsqueeze(-1)


def token_gae(
    reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lmbda: float
) -> tuple[Tensor, Tensor]:
    """GAE over the tokens of each response (Schulman et al. 2016).

    Every response, even a truncated one, is terminal at its last token: no reward can follow.

    ``reward`` [B, R, 1] is the shaped one; ``value`` [B, R] is V(s_t) before token t; ``gamma``
    discounts per token.

    Returns:
        (advantage, value target), each [B, R, 1], 0 at padding.
    """
    real = mask.unsqueeze(-1)
    reward, state_value = reward.masked_fill(~real, 0.0), value.unsqueeze(-1).masked_fill(~real, 0)
    following = torch.cat([state_value[:, 1:], torch.zeros_like(state_value[:, :1])], 1)
    # Reward and value are 0 at padding, so no done flag is needed to stop the bootstrap at the end.
    never = torch.zeros_like(real)
    # TorchRL 0.14.1's vectorised function is not used: it fails at gamma * lmbda = 0.
    advantage, target = generalized_advantage_estimate(
        gamma, lmbda, state_value, following, reward, done=never, terminated=never
    )
    return advantage.masked_fill(~real, 0.0), target.masked_fill(~real, 0.0)


Advantage = Callable[[TensorDictBase], TensorDictBase]


def gae(config: LanguageConfig, policy: Policy, kl: ReferenceKL | None) -> Advantage:
    """``advantage=gae``: GAE per token, with the value head.

    The function writes ``advantage``, ``value_target`` and ``state_value``, [B, R, 1] each.
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
        if kl is not None and (excess := batch.get(EXCESS, None)) is not None:
            batch["advantage"] += kl.coef * excess.unsqueeze(-1)
        batch["state_value"] = value.unsqueeze(-1)
        if advantage.reward_weight == 0 and not reward.any():  # as in control's gae
            batch["advantage"] = torch.zeros_like(batch["advantage"])
            batch["value_target"] = batch["state_value"].clone()
        return batch

    return estimate


def group(config: LanguageConfig, policy: Policy, kl: ReferenceKL | None) -> Advantage:
    """``advantage=group``: the score relative to the scores of the prompt's group, [B, R, 1]."""
    assert isinstance(config.advantage, GroupConfig)
    baseline, weight = config.advantage.baseline, config.advantage.reward_weight
    group_size = config.collector.group_size

    @torch.no_grad()
    def estimate(batch: TensorDictBase) -> TensorDictBase:
        mask, score = response_mask(batch), batch[SCORE].flatten()
        charged, coef = torch.zeros(mask.shape, device=score.device), 0.0
        if kl is not None:
            charged, coef = to_go(batch[CHARGED].squeeze(-1), mask, kl.placement), kl.coef
            charged = charged - batch.get(EXCESS, 0.0)
        batch["advantage"] = group_advantage(
            score, group_size, baseline, charged, mask, coef, weight
        )
        return batch

    return estimate
