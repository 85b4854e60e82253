"""NeMo-RL: the KL of ``ClippedPGLossFn`` by its formula, since no wheel of it is published.

NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/loss_functions.py, commit 006907a9: each token's estimate
times exp(x - stop(x)) with x = log pi or, with use_on_policy_kl_approximation, times w.
"""

SYSTEM = "NeMo-RL 006907a9"
_KINDS = {
    "k1": lambda r: r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: (-r).exp() - 1 + r,
}


def _loss(kind, weighted=False):
    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        base = old_log_probs if weighted else log_probs.detach()
        kl = (log_probs - base).exp() * _KINDS[kind](log_probs - ref_log_probs)
        return coef * (kl * mask).sum(1).mean()

    return loss


ROWS = {
    **{f"reference_policy_kl_type={kind}": _loss(kind) for kind in _KINDS},
    "reference_policy_kl_type=k3, use_on_policy_kl_approximation": _loss("k3", weighted=True),
}
