"""SkyRL: ``compute_approx_kl``; a mean per response, as skyrl_train/workers/worker.py takes it."""

from _skyrl import ppo_utils

SYSTEM = "SkyRL 0.4.0"


def _loss(estimator):
    def loss(log_probs, ref_log_probs, mask, coef):
        kl = ppo_utils.compute_approx_kl(log_probs, ref_log_probs, mask, estimator)
        kl = ((kl * mask).sum(1) / mask.sum(1)).mean()
        return coef * kl * mask.sum() / len(mask)

    return loss


ROWS = {f"use_kl_loss, kl_estimator_type={name}": _loss(name) for name in ("k1", "abs", "k2", "k3")}
