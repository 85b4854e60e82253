"""TorchRL: ``KLComputation._step`` (torchrl/envs/llm/transforms/kl.py): RetrieveKL, add_to_reward.

It is called on a batch that only gives lists. Behind it REINFORCE on the sums of the rewards to
come, with each token's ratio.
"""

import torch
from torchrl.envs.llm.transforms.kl import KLComputation

SYSTEM = "TorchRL 0.14.1"


class _Batch(dict):
    def get(self, key, as_list=True):
        return list(self[key])

    def set(self, key, value):
        self[key] = value


def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
    charge = KLComputation(("gen", "full"), ("ref", "full"), coeff=coef)
    rewards = torch.zeros_like(old_log_probs)[..., None]
    batch = _Batch({("gen", "full"): old_log_probs, ("ref", "full"): ref_log_probs})
    batch["reward"] = rewards
    charge._step(None, batch)
    rewards = batch["reward"].to_padded_tensor(0.0)[..., 0] * mask
    gains = rewards.flip(1).cumsum(1).flip(1)
    return -((log_probs - old_log_probs).exp() * gains * mask).sum(1).mean()


ROWS = {"KLComputation, add_to_reward": loss}
