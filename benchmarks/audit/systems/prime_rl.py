"""prime-rl: ``default_loss_fn`` and ``opd_loss_fn`` by their formulas; it publishes no wheel.

PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/loss.py, of 2026. A teacher's KL is charged to
the advantage, and a token is dropped where its probability fell by more than .2.
"""

SYSTEM = "prime-rl 2026"


def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
    keep = mask & (log_probs.exp() - old_log_probs.exp() >= -0.2)
    gain = coef * (ref_log_probs - log_probs).detach()
    return -((log_probs - old_log_probs).exp() * gain * keep).sum(1).mean()


ROWS = {"opd, KL to the teacher": loss}
