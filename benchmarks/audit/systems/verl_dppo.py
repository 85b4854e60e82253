"""verl: ``compute_policy_loss_dppo_kl`` (verl/trainer/ppo/core_algos.py): a mask, no penalty."""

from verl.trainer.ppo.core_algos import compute_policy_loss_dppo_kl
from verl.workers.config import ActorConfig

SYSTEM = "verl 0.9.1"
DIVERGENCE = "none"


def _loss(bound):
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=bound,
        clip_ratio_low=bound, clip_ratio_high=bound,
    )  # fmt: skip

    def loss(log_probs, old_log_probs, advantages, mask):
        return compute_policy_loss_dppo_kl(
            old_log_probs, log_probs, advantages, mask, "seq-mean-token-sum", config
        )[0]

    return loss


ROWS = {f"policy loss dppo_kl, clip_ratio={bound}": _loss(bound) for bound in (0.2, 0.05)}
