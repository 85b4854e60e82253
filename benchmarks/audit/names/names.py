"""KL terms by the names that papers and threads have for them.

r = log pi - log pi_ref of a token, w = pi / pi_old of a token, W their product over a response. A
term "in the reward" is that of pi_old, under each token's w, as PPO has it without its clip.
"""

SYSTEM = "names"


def _sum(x, mask):
    return (x * mask).sum(1).mean()


def _k3(r):
    return (-r).exp() - 1 + r


def _exact(logits, ref_logits):
    return (logits.exp() * (logits - ref_logits)).sum(-1)


def _to_go(x):
    return x.flip(1).cumsum(1).flip(1)


def _in_loss(term):
    """Coef times the mean over responses of the sum of term(r, w) over tokens."""

    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        r, w = log_probs - ref_log_probs, (log_probs - old_log_probs).exp()
        return coef * _sum(term(r, w), mask)

    return loss


def _in_reward(term, gains):
    """Each token charged with the gains of term(r of pi_old), to be minimised."""

    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        gain = gains(term(old_log_probs - ref_log_probs) * mask)
        return coef * _sum((log_probs - old_log_probs).exp() * gain, mask)

    return loss


def _k1(r):
    return r


def exact(logits, ref_logits, mask, coef):
    return coef * _sum(_exact(logits, ref_logits), mask)


def split(logits, ref_logits, log_probs, old_log_probs, mask, coef):
    kl = _exact(logits, ref_logits) * mask
    later = (_to_go(kl) - kl).detach()
    return coef * _sum(kl + (log_probs - old_log_probs).exp() * later, mask)


def squared(log_probs, ref_log_probs, mask, coef):
    return coef * (((log_probs - ref_log_probs) * mask).sum(1) ** 2 / 2).mean()


def weighted_squared(log_probs, old_log_probs, ref_log_probs, mask, coef):
    whole = ((log_probs - old_log_probs) * mask).sum(1).exp().detach()
    return coef * (whole * ((log_probs - ref_log_probs) * mask).sum(1) ** 2 / 2).mean()


def prefix(log_probs, old_log_probs, ref_log_probs, mask, coef):
    ratio = ((log_probs - old_log_probs) * mask).cumsum(1).exp()
    return coef * _sum(ratio * _k3(log_probs - ref_log_probs), mask)


def geometric(log_probs, old_log_probs, ref_log_probs, mask, coef):
    mean = ((log_probs - old_log_probs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return coef * _sum(mean.exp() * _k3(log_probs - ref_log_probs), mask)


def forward(logits, ref_logits, mask, coef):
    return coef * _sum((ref_logits.exp() * (ref_logits - logits)).sum(-1), mask)


ROWS = {
    "k1 as loss": _in_loss(lambda r, w: r),
    "k2 as loss": _in_loss(lambda r, w: r**2 / 2),
    "k3 as loss (GRPO)": _in_loss(lambda r, w: _k3(r)),
    "k2 straight through (k3+)": _in_loss(
        lambda r, w: _k3(r).detach() + (q := r**2 / 2) - q.detach()
    ),
    "w k1": _in_loss(lambda r, w: w * r),
    "w k2": _in_loss(lambda r, w: w * r**2 / 2),
    "w k3 (DeepSeek-V3.2)": _in_loss(lambda r, w: w * _k3(r)),
    "stop(w) k1": _in_loss(lambda r, w: w.detach() * r),
    "stop(w) k2": _in_loss(lambda r, w: w.detach() * r**2 / 2),
    "stop(w) k3": _in_loss(lambda r, w: w.detach() * _k3(r)),
    "geometric mean of w, times k3": geometric,
    "product of w up to the token, times k3": prefix,
    "exact per token (full vocabulary)": exact,
    "exact per token, later ones in the reward (split)": split,
    "k2 of the response's sum": squared,
    "stop(W) k2 of the response's sum": weighted_squared,
    "k1 in the reward, to go": _in_reward(_k1, _to_go),
    "k1 in the reward, of the whole response (RLOO)": _in_reward(
        _k1, lambda x: x.sum(1, keepdim=True)
    ),
    "k1 in the reward, discount 0": _in_reward(_k1, lambda x: x),
    "k2 in the reward, to go": _in_reward(lambda r: r**2 / 2, _to_go),
    "k3 in the reward, to go": _in_reward(_k3, _to_go),
    "k3 in the reward, discount 0": _in_reward(_k3, lambda x: x),
    "forward KL per token (distillation)": forward,
}
