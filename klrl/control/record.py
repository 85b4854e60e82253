"""What a row of a control run reports of its rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from klrl.control.kl import RAW_REWARD_KEY
from klrl.kl.charge import KL_KEY, ReferenceKL
from klrl.runs.metrics import Row
from klrl.train.row import Rewards

if TYPE_CHECKING:
    from klrl.control.reward_norm import RewardNormalizer


def rewards_of(
    batch: TensorDictBase, kl: ReferenceKL | None, normalizer: RewardNormalizer | None = None
) -> Rewards:
    """Rewards and episodes of a charged rollout [N, T]."""
    after = batch.get("next")
    shaped, own = _mean(after.get("reward")), _episodes(after)
    if normalizer is not None:
        own["learner/reward_norm"] = normalizer.scale
    if kl is None or not kl.charges_reward:
        return Rewards(shaped, shaped, 0.0, own)
    return Rewards(_mean(after.get(RAW_REWARD_KEY)), shaped, _mean(after.get(KL_KEY)), own)


def _mean(value: torch.Tensor) -> float:
    """Mean in float64: the ledger's identity holds to rounding of the rewards themselves."""
    return float(value.double().mean())


def _episodes(after: TensorDictBase) -> Row:
    """Return and length of the episodes that ended in a rollout; nothing where none did."""
    ended = after.get("done")
    if not ended.any():
        return {"reward/episodes": 0}
    return {
        "reward/episode": _mean(after.get("episode_reward")[ended]),
        "reward/episode_length": _mean(after.get("step_count")[ended]),
        "reward/episodes": int(ended.sum()),
    }
