"""verl: ``kl_penalty``, ``agg_loss`` (verl/trainer/ppo/core_algos.py): actor.use_kl_loss=True."""

from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

SYSTEM = "verl 0.9.1"


def _loss(kl_loss_type, mode="token-mean"):
    def loss(log_probs, ref_log_probs, mask, coef):
        kl = kl_penalty(log_probs, ref_log_probs, kl_loss_type)
        return coef * agg_loss(kl, mask, mode) * mask.sum() / len(mask)

    return loss


TYPES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+")
ROWS = {
    **{f"kl_loss_type={kind}": _loss(kind) for kind in TYPES},
    "kl_loss_type=low_var_kl+, seq-mean-token-mean": _loss("low_var_kl+", "seq-mean-token-mean"),
}
