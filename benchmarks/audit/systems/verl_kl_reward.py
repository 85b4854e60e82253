"""verl: ``apply_kl_penalty`` (trainer/ppo/ray_trainer.py), algorithm.use_kl_in_reward=True.

Behind it verl's Dr. GRPO advantage, a response's whole sum less the mean, and its PPO loss.
"""

import sys
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import (
    FixedKLController,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.workers.config import ActorConfig

# The trainer's file imports servers and a data loader that nothing here calls.
UNUSED = ("verl.workers.rollout.llm_server", "torchdata", "torchdata.stateful_dataloader")
with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}):
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

SYSTEM = "verl 0.9.1"


def _loss(kind, clip=0.2):
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=clip,
        clip_ratio_low=clip, clip_ratio_high=clip,
    )  # fmt: skip

    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        batch = DataProto.from_dict(
            {
                "response_mask": mask.long(),
                "token_level_scores": torch.zeros_like(old_log_probs),
                "old_log_probs": old_log_probs,
                "ref_log_prob": ref_log_probs,
            }
        )
        batch, _ = apply_kl_penalty(batch, FixedKLController(coef), kind)
        advantages, _ = compute_grpo_outcome_advantage(
            batch.batch["token_level_rewards"], mask, np.zeros(len(mask)),
            norm_adv_by_std_in_grpo=False,
        )  # fmt: skip
        out, _ = compute_policy_loss_vanilla(
            old_log_probs, log_probs, advantages, mask, "seq-mean-token-sum", config
        )
        return out

    return loss


KINDS = ("kl", "abs", "mse", "low_var_kl")
ROWS = {f"use_kl_in_reward, kl_penalty={kind}": _loss(kind) for kind in KINDS}
