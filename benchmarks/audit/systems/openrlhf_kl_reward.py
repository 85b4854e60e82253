"""OpenRLHF: ``compute_reward`` (openrlhf/models/utils.py) and ``PolicyLoss`` (models/loss.py).

The returns between them are the sums of the rewards to come: --algo.advantage.estimator reinforce,
gamma 1.
"""

import torch
from _openrlhf import loss as losses
from _openrlhf import utils

SYSTEM = "OpenRLHF 0.11.2"


def _loss(estimator):
    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        kl = utils.compute_approx_kl(old_log_probs, ref_log_probs, kl_estimator=estimator) * mask
        rewards = utils.compute_reward(torch.zeros(len(mask)), coef, kl, mask) * mask
        gains = rewards.flip(1).cumsum(1).flip(1)
        out = losses.PolicyLoss()(log_probs, old_log_probs, gains, mask)
        return out[0] * mask.sum() / len(mask)

    return loss


ROWS = {f"KL in the reward, estimator={name}": _loss(name) for name in ("k1", "k2", "k3")}
