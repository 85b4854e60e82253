"""Losses for ``klrl doctor --loss docs/examples/losses.py:NAME``: right ones, then wrong ones.

All arguments but ``coef`` are [N, steps]; ``mask`` is 0 behind an episode's end. Each loss is to
be minimised; it has a part for the return and one for coef * KL(pi||ref), or names its options.
"""

import torch
from tensordict import TensorDict
from torch import nn

from klrl.losses.sampler import binary_tv, sampler_weight, trusted


def _to_go(x):
    """Sums from each step on."""
    return x.flip(1).cumsum(1).flip(1)


def _return(log_probs, old_log_probs, advantages, mask):
    ratio = (log_probs - old_log_probs).exp()
    return -(ratio * advantages * mask).sum(1)


# ------------------------------------------------------------------------------------------- right


def k1_in_reward(log_probs, ref_log_probs, rewards, mask, coef):
    """REINFORCE on reward - coef * k1; the score function leads through later steps too."""
    k1 = (log_probs - ref_log_probs).detach()
    return -(log_probs * _to_go((rewards - coef * k1) * mask) * mask).sum(1).mean()


def k2_of_sequences(log_probs, old_log_probs, ref_log_probs, advantages, mask, coef):
    """k2 of a whole response: the square of the summed log-ratio, halved."""
    log_ratio = ((log_probs - ref_log_probs) * mask).sum(1)
    return (_return(log_probs, old_log_probs, advantages, mask) + coef * log_ratio**2 / 2).mean()


def split(logits, ref_logits, log_probs, old_log_probs, advantages, mask, coef):
    """The exact KL of each step; ``--placement split`` charges the advantages with later ones."""
    kl = (logits.softmax(-1) * (logits.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)
    gain = _return(log_probs, old_log_probs, advantages, mask)
    return (gain + coef * (kl * mask).sum(1)).sum() / mask.sum()


def k2_stopped(log_probs, old_log_probs, ref_log_probs, rewards, mask, coef):
    """k2 of the own step, k1 of later ones in the reward: the stop-gradients decide."""
    r = (log_probs - ref_log_probs) * mask
    later = _to_go(r.detach()) - r.detach()
    gain = (_to_go(rewards * mask) - coef * later) * log_probs * mask
    return (-gain.sum(1) + coef * (r**2 / 2).sum(1)).mean()


def whitened(log_probs, ref_log_probs, rewards, mask, coef):
    """The whole shaped return normalised: right up to a factor that depends on coef."""
    shaped = ((rewards - coef * (log_probs - ref_log_probs).detach()) * mask).sum(1, keepdim=True)
    return -((shaped - shaped.mean()) / shaped.std() * log_probs * mask).sum(1).mean()


def distillation(logits, ref_logits, mask):
    """The teacher's cross entropy, at the student's states: ``--divergence forward``."""
    return -((ref_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) * mask).sum(1).mean()


def trust_region(log_probs, old_log_probs, advantages, mask, coef):
    """k3 of pi_old's samples is KL(old||pi): ``--stale 3 --divergence forward``."""
    ratio = (log_probs - old_log_probs).exp()
    kl = ratio - 1 - ratio.log()
    return ((coef * kl - ratio * advantages) * mask).sum(1).mean()


def sampler_weighted(
    log_probs, old_log_probs, advantages, mask, weight="truncate", cap=None, low=None, high=None
):
    """``loss.sampler_weight`` as an update starts; old_log_probs are the sampler's."""
    now = log_probs.detach()
    w = sampler_weight(weight, now, old_log_probs, mask, (cap, low, high))
    return -(w * (log_probs - now).exp() * advantages * mask).sum(1).mean()


def dppo(log_probs, old_log_probs, advantages, mask, delta=0.1):
    """``loss=dppo``: right while no token is further than delta from the sampler."""
    log_p = log_probs.detach()
    kept = trusted(log_p, old_log_probs, advantages, binary_tv(log_p, old_log_probs) > delta)
    return _return(log_probs, old_log_probs, advantages, mask * kept).mean()


class SplitModule(nn.Module):
    """``split`` as a LossModule: built with the actor and the reference, called on a TensorDict."""

    def __init__(self, actor, reference, coef):
        super().__init__()
        self.actor, self.reference, self.coef = actor, reference, coef

    def forward(self, data):
        """What is minimised: the sum of the terms whose names begin with loss_."""
        dist, ref_dist = (policy.get_dist(data.copy()) for policy in (self.actor, self.reference))
        ratio = (dist.log_prob(data["action"]) - data["action_log_prob"]).exp()
        kl = torch.distributions.kl_divergence(dist, ref_dist)
        gain = (ratio * data["advantage"].squeeze(-1)).mean()
        return TensorDict({"loss_objective": -gain, "loss_kl": self.coef * kl.mean()})


# ------------------------------------------------------------------------------------------- wrong


def k1_as_loss(log_probs, old_log_probs, ref_log_probs, advantages, mask, coef):
    """The mean of grad log pi is 0: this KL pushes nowhere."""
    kl = ((log_probs - ref_log_probs) * mask).sum(1)
    return (_return(log_probs, old_log_probs, advantages, mask) + coef * kl).mean()


def k3_as_loss(log_probs, old_log_probs, ref_log_probs, advantages, mask, coef):
    """As in GRPO: a good estimate of KL(pi||ref) whose gradient is another KL's."""
    r = log_probs - ref_log_probs
    kl = (((-r).exp() - 1 + r) * mask).sum(1)
    return (_return(log_probs, old_log_probs, advantages, mask) + coef * kl).mean()


def own_step_only(log_probs, old_log_probs, ref_log_probs, advantages, mask, coef):
    """k2 of each step."""
    kl = ((log_probs - ref_log_probs) ** 2 / 2 * mask).sum(1)
    return (_return(log_probs, old_log_probs, advantages, mask) + coef * kl).mean()


def wrong_sign(log_probs, ref_log_probs, rewards, mask, coef):
    """k1_in_reward with a plus."""
    return k1_in_reward(log_probs, ref_log_probs, rewards, mask, -coef)


def mask_ignored(log_probs, old_log_probs, ref_log_probs, advantages, mask, coef):
    """k2_of_sequences that sums over padding."""
    return k2_of_sequences(
        log_probs, old_log_probs, ref_log_probs, advantages, torch.ones_like(mask), coef
    )


def normalised(log_probs, old_log_probs, ref_log_probs, advantages, mask, coef):
    """The advantage is divided by its spread, the KL is not: coef acts as another number."""
    spread = advantages[mask].std()
    return k2_of_sequences(log_probs, old_log_probs, ref_log_probs, advantages / spread, mask, coef)


def per_response(log_probs, ref_log_probs, rewards, mask, coef):
    """k1_in_reward, averaged over each response and then over responses."""
    k1 = (log_probs - ref_log_probs).detach()
    terms = log_probs * _to_go((rewards - coef * k1) * mask) * mask
    return -(terms.sum(1) / mask.sum(1)).mean()


def clipped(log_probs, old_log_probs, advantages, mask):
    """PPO: ``--stale 3 --divergence none``, and ``--scope token`` for its clip alone."""
    ratio = (log_probs - old_log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(gain * mask).sum(1).mean()
