"""Losses as the field writes them, with what the doctor must say: right ones, then wrong ones.

``log_probs`` are those of pi, which learns; ``old_log_probs`` of pi_old, which sampled.
"""

import torch
from tensordict import TensorDict


def _to_go(x):
    return x.flip(1).cumsum(1).flip(1)


def _sum(x, mask):
    return (x * mask).sum(1).mean()


def _sum_of(x, mask):
    return (x * mask).sum(1, keepdim=True)


def _kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


# ------------------------------------------------------------------------------- at pi = pi_old


def forward_distillation(logits, ref_logits, mask):
    """The teacher's cross entropy at the student's states."""
    return -_sum((ref_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1), mask)


def forward_of_sequences(log_probs, ref_log_probs, mask, coef):
    """k3 of a whole response."""
    r = ((log_probs - ref_log_probs) * mask).sum(1)
    return coef * ((-r).exp() - 1 + r).mean()


def forward_everywhere(logits, ref_logits, log_probs, advantages, mask, coef):
    """The forward KL of each step, and of later ones where the advantages are charged (split)."""
    return _sum(coef * _kl(ref_logits, logits) - advantages * log_probs, mask)


def js_of_steps(logits, ref_logits, mask, coef):
    m = torch.logaddexp(logits, ref_logits) - torch.log(torch.tensor(2.0))
    return coef * _sum((_kl(logits, m) + _kl(ref_logits, m)) / 2, mask)


def tv_of_steps(logits, ref_logits, mask):
    return _sum((logits.exp() - ref_logits.exp()).abs().sum(-1) / 2, mask)


def tv_of_sequences(log_probs, ref_log_probs, mask, coef):
    """By the score function: f(u) - u f'(u) = sign(1 - u) / 2 for f = |1 - u| / 2."""
    whole, ref = ((x * mask).sum(1) for x in (log_probs, ref_log_probs))
    return coef * (whole * (whole - ref).sign().detach() / 2).mean()


def whitened_shaped(log_probs, ref_log_probs, rewards, mask, coef):
    """The shaped return of a response minus its mean, over its standard deviation."""
    r = (log_probs - ref_log_probs).detach()
    shaped = ((rewards - coef * r) * mask).sum(1, keepdim=True)
    return -_sum((shaped - shaped.mean()) / shaped.std() * log_probs, mask)


def over_coef(log_probs, ref_log_probs, rewards, mask, coef):
    """Rewards in units of coef: 1e12 of them at coef=0."""
    k1 = (log_probs - ref_log_probs).detach()
    return -_sum(_to_go((rewards / (coef + 1e-12) - k1) * mask) * log_probs, mask)


class Penalty(torch.nn.Module):
    """A LossModule without a return: the exact KL in the sampled states."""

    def __init__(self, actor, reference, coef=1.0):
        super().__init__()
        self.actor, self.reference, self.coef = actor, reference, coef

    def forward(self, data):
        pi, ref = (each.get_dist(data.copy()) for each in (self.actor, self.reference))
        kl = torch.distributions.kl_divergence(pi, ref)
        return TensorDict({"loss_kl": self.coef * kl.mean()})


def penalty(actor, reference):
    return Penalty(actor, reference)


def policy_gradient(log_probs, advantages, mask):
    return -_sum(advantages * log_probs, mask)


def per_response(log_probs, advantages, mask):
    return -((advantages * log_probs * mask).sum(1) / mask.sum(1)).mean()


def own_step(log_probs, ref_log_probs, mask, coef):
    return coef * _sum((log_probs - ref_log_probs) ** 2 / 2, mask)


def squared_gap(log_probs, ref_log_probs, rewards, mask, coef):
    """(R - coef log(pi / ref) - mean)^2 / 2, as Kimi k1.5: coef times the gradient of -J."""
    gap = (rewards - coef * (log_probs - ref_log_probs) * mask).sum(1)
    return ((gap - gap.mean().detach()) ** 2 / 2).mean()


def shaped(log_probs, ref_log_probs, rewards, mask, coef):
    k1 = (log_probs - ref_log_probs).detach()
    return -_sum(_to_go((rewards - coef * k1) * mask) * log_probs, mask)


def times_coef(log_probs, ref_log_probs, rewards, mask, coef):
    return coef * shaped(log_probs, ref_log_probs, rewards, mask, coef)


def per_longest(log_probs, ref_log_probs, mask, coef):
    """k2 of each token, divided by the longest possible response, as Dr. GRPO divides."""
    return own_step(log_probs, ref_log_probs, mask, coef) / 32768


# wrong ones


def k3_per_longest(log_probs, ref_log_probs, advantages, mask, coef):
    r = log_probs - ref_log_probs
    return _sum(coef * ((-r).exp() - 1 + r) - advantages * log_probs, mask) / 32768


def square_of_coef(log_probs, ref_log_probs, rewards, mask, coef):
    """Right at coef=0.5 alone."""
    return shaped(log_probs, ref_log_probs, rewards, mask, 2 * coef**2)


def capped_coef(log_probs, ref_log_probs, rewards, mask, coef):
    """Right up to coef=0.5; beyond, the return fades."""
    return shaped(log_probs, ref_log_probs, rewards * (coef < 0.75), mask, coef)


def two_weights(log_probs, old_log_probs, ref_log_probs, rewards, mask, beta, ref_coef=0.5):
    """``beta`` weighs the KL to pi_old, ``ref_coef`` that to ref."""
    to_old = beta * _sum(old_log_probs - log_probs, mask)
    return to_old + shaped(log_probs, ref_log_probs, rewards, mask, ref_coef)


def own_and_forward(log_probs, logits, ref_logits, rewards, mask, coef):
    """Two KLs, and no gradient of the return."""
    both = _kl(logits, ref_logits) + _kl(ref_logits, logits)
    return coef * _sum(both, mask) - _sum(rewards * log_probs.detach(), mask)


def convex(log_probs, ref_log_probs, rewards, mask, coef):
    """(1 - coef) of the return, coef of the KL."""
    return shaped(log_probs, ref_log_probs, (1 - coef) * rewards, mask, coef)


# ------------------------------------------------------------------------- pi has moved: --stale


def _log_ratio(log_probs, old_log_probs, mask):
    return (log_probs - old_log_probs) * mask


def _product(log_probs, old_log_probs, mask):
    """Of the ratios of an episode, [N, 1]."""
    return _log_ratio(log_probs, old_log_probs, mask).sum(1, keepdim=True).exp()


def importance(log_probs, old_log_probs, advantages, mask):
    """REINFORCE under the product of the episode's ratios."""
    return -_sum(_product(log_probs, old_log_probs, mask).detach() * advantages * log_probs, mask)


def sequence_k2(log_probs, old_log_probs, ref_log_probs, rewards, mask, coef):
    """The product of the ratios on the return and on k2 of the episode."""
    weight = _product(log_probs, old_log_probs, mask).detach()
    r = ((log_probs - ref_log_probs) * mask).sum(1, keepdim=True)
    gain = weight * rewards.sum(1, keepdim=True)
    return (weight * coef * r**2 / 2).mean() - _sum(gain * log_probs, mask)


def prefix_k1(log_probs, old_log_probs, ref_log_probs, mask, coef):
    """The product up to each token, with its gradient, on the token's k1: unbiased."""
    prefix = _log_ratio(log_probs, old_log_probs, mask).cumsum(1).exp()
    return coef * _sum(prefix * (log_probs - ref_log_probs), mask)


def prefix_exact(logits, ref_logits, log_probs, old_log_probs, mask, coef):
    """The product before each token, with its gradient, on the state's exact KL: unbiased."""
    ratio = _log_ratio(log_probs, old_log_probs, mask)
    return coef * _sum((ratio.cumsum(1) - ratio).exp() * _kl(logits, ref_logits), mask)


def prefix_k2(log_probs, old_log_probs, ref_log_probs, mask, coef):
    """The product up to each token, detached, on its k2: each step's own KL, in pi's states."""
    prefix = _log_ratio(log_probs, old_log_probs, mask).cumsum(1).exp().detach()
    return coef * _sum(prefix * (log_probs - ref_log_probs) ** 2 / 2, mask)


def token_k3(log_probs, old_log_probs, ref_log_probs, mask, coef):
    """Each token's own ratio, with its gradient, on its k3."""
    r = log_probs - ref_log_probs
    return coef * _sum((log_probs - old_log_probs).exp() * ((-r).exp() - 1 + r), mask)


def surrogate(log_probs, old_log_probs, advantages, mask):
    """PPO's without its clip."""
    return -_sum((log_probs - old_log_probs).exp() * advantages, mask)


def old_kl(log_probs, old_log_probs, mask, coef):
    """KL(old||pi) from pi_old's samples: the mean of -log pi."""
    return coef * _sum(old_log_probs - log_probs, mask)


def old_k3(log_probs, old_log_probs, mask, coef):
    ratio = log_probs - old_log_probs
    return coef * _sum(ratio.exp() - 1 - ratio, mask)


def old_tv(log_probs, old_log_probs, mask, coef):
    """DPPO's distance, |ratio - 1| / 2."""
    return coef * _sum(((log_probs - old_log_probs).exp() - 1).abs() / 2, mask)


def trpo(log_probs, old_logits, logits, old_log_probs, advantages, mask, coef):
    """The surrogate minus coef * KL(old||pi), exact."""
    gain = (log_probs - old_log_probs).exp() * advantages
    return _sum(coef * _kl(old_logits, logits) - gain, mask)


# wrong ones


def k2_no_weight(log_probs, ref_log_probs, mask, coef):
    return coef * (((log_probs - ref_log_probs) * mask).sum(1) ** 2 / 2).mean()


def k3_no_weight(log_probs, ref_log_probs, mask, coef):
    r = log_probs - ref_log_probs
    return coef * _sum((-r).exp() - 1 + r, mask)


def reinforce(log_probs, advantages, mask):
    return -_sum(advantages * log_probs, mask)


def inverse(log_probs, old_log_probs, advantages, mask):
    return -_sum((old_log_probs - log_probs).exp().detach() * advantages * log_probs, mask)


def gspo(log_probs, old_log_probs, rewards, mask):
    """The geometric mean of the ratios."""
    mean = _log_ratio(log_probs, old_log_probs, mask).sum(1) / mask.sum(1)
    score = rewards.sum(1)
    return -(mean.exp() * (score - score.mean())).mean()


def cispo(log_probs, old_log_probs, advantages, mask):
    weight = (log_probs - old_log_probs).exp().clamp(0.8, 1.2).detach()
    return -_sum(weight * advantages * log_probs, mask)


def ppo(log_probs, old_log_probs, advantages, mask):
    ratio = (log_probs - old_log_probs).exp()
    return -_sum(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages), mask)


def dppo_mask(log_probs, old_log_probs, advantages, mask):
    """Tokens whose probability moved by more than .05 are left out."""
    near = (log_probs.exp() - old_log_probs.exp()).abs() < 0.05
    return -_sum(near * (log_probs - old_log_probs).exp() * advantages, mask)


def truncated_k2(log_probs, old_log_probs, ref_log_probs, mask, coef):
    weight = _product(log_probs, old_log_probs, mask).clamp(max=1.2).detach()
    r = ((log_probs - ref_log_probs) * mask).sum(1, keepdim=True)
    return coef * (weight * r**2 / 2).mean()


def detached_k1(log_probs, old_log_probs, ref_log_probs, mask, coef):
    weight = _product(log_probs, old_log_probs, mask).detach()
    return coef * _sum(weight * (log_probs - ref_log_probs), mask)


def k1_of_old(log_probs, old_log_probs, ref_log_probs, rewards, mask, coef):
    """The KL in the reward was computed when pi_old sampled, and kept."""
    weight = _product(log_probs, old_log_probs, mask).detach()
    shaped = _to_go((rewards - coef * (old_log_probs - ref_log_probs)) * mask)
    return -_sum(weight * shaped * log_probs, mask)


def differentiable_k2(log_probs, old_log_probs, ref_log_probs, mask, coef):
    r = ((log_probs - ref_log_probs) * mask).sum(1, keepdim=True)
    return coef * (_product(log_probs, old_log_probs, mask) * r**2 / 2).mean()


def swapped_k3(log_probs, old_log_probs, ref_log_probs, mask, coef):
    r = ((log_probs - ref_log_probs) * mask).sum(1, keepdim=True)
    return coef * (_product(log_probs, old_log_probs, mask).detach() * (r.exp() - 1 - r)).mean()


def grpo_k3_reward(log_probs, old_log_probs, ref_log_probs, mask, coef):
    """k3 of pi_old in the reward, a response's sum less the batch's mean."""
    r = old_log_probs - ref_log_probs
    cost = _sum_of((-r).exp() - 1 + r, mask)
    return coef * _sum((log_probs - old_log_probs).exp() * (cost - cost.mean()), mask)


def near_old(log_probs, old_log_probs, ref_log_probs, mask, coef):
    """Meant for the reference."""
    r = (log_probs - old_log_probs) * mask + 0 * ref_log_probs
    return coef * (r.sum(1) ** 2 / 2).mean()


def detached_ratio(log_probs, old_log_probs, advantages, mask):
    return (
        -_sum((log_probs.detach() - old_log_probs).exp() * advantages, mask) + 0 * log_probs.sum()
    )


def forward_no_weight(log_probs, ref_log_probs, mask, coef):
    """Distillation on pi_old's tokens."""
    return -coef * _sum((ref_log_probs - log_probs).exp().detach() * log_probs, mask)


def sampled_by_ref(log_probs, ref_log_probs, rewards, mask, coef):
    """The reference taken as the policy that sampled."""
    k1 = (log_probs - ref_log_probs).detach()
    shaped = ((rewards - coef * k1) * mask).sum(1, keepdim=True)
    return -_sum(_product(log_probs, ref_log_probs, mask).detach() * shaped * log_probs, mask)


def u_log_u(log_probs, ref_log_probs, mask):
    """The forward KL's value by importance weights, differentiated."""
    u = (ref_log_probs - log_probs).exp()
    return _sum(u * u.log(), mask)


def undetached(log_probs, ref_log_probs, rewards, mask, coef):
    """k1 in the reward, with its gradient."""
    return -_sum(log_probs * _to_go((rewards - coef * (log_probs - ref_log_probs)) * mask), mask)


def ppo_max(log_probs, old_log_probs, advantages, mask):
    ratio = (log_probs - old_log_probs).exp()
    return -_sum(torch.max(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages), mask)


def old_sign(log_probs, old_log_probs, mask, coef):
    """k1 = log pi - log old as a loss."""
    return coef * _sum(log_probs - old_log_probs, mask)


def old_k2(log_probs, old_log_probs, mask, coef):
    return coef * _sum((log_probs - old_log_probs) ** 2 / 2, mask)


def old_reverse(logits, old_logits, mask, coef):
    """KL(pi||old) of each state."""
    return coef * _sum(_kl(logits, old_logits), mask)
