"""OpenRLHF: ``compute_approx_kl`` and ``aggregate_loss`` (openrlhf/models/), --algo.kl.use_loss."""

from _openrlhf import loss as losses
from _openrlhf import utils

SYSTEM = "OpenRLHF 0.11.2"


def _loss(estimator, unbiased=False, token_level=True):
    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        kl = utils.compute_approx_kl(log_probs, ref_log_probs, old_log_probs, estimator, unbiased)
        return coef * losses.aggregate_loss(kl, mask, token_level) * mask.sum() / len(mask)

    return loss


ROWS = {
    **{f"kl.use_loss, estimator={name}": _loss(name) for name in ("k1", "k2", "k3")},
    "kl.use_loss, estimator=k2, GSPO's mean per response": _loss("k2", token_level=False),
    **{
        f"kl.use_loss, unbiased_gradient, estimator={name}": _loss(name, unbiased=True)
        for name in ("k1", "k3")
    },
}
