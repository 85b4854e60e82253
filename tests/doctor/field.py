"""Losses as the field writes them, with what the doctor must say: right ones, then wrong ones.

``log_probs`` are those of pi, which learns; ``old_log_probs`` of pi_old, which sampled.
"""

import torch


def _to_go(x):
    return x.flip(1).cumsum(1).flip(1)


def _sum(x, mask):
    return (x * mask).sum(1).mean()


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


def policy_gradient(log_probs, advantages, mask):
    return -_sum(advantages * log_probs, mask)


def per_response(log_probs, advantages, mask):
    return -((advantages * log_probs * mask).sum(1) / mask.sum(1)).mean()


def own_step(log_probs, ref_log_probs, mask, coef):
    return coef * _sum((log_probs - ref_log_probs) ** 2 / 2, mask)
