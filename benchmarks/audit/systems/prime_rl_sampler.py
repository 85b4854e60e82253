"""prime-rl: ``kl_tau`` of ``default_loss_fn``, by its formula: kl_tau (log pi - log mu)^2."""

SYSTEM, DIVERGENCE = "prime-rl 2026", "forward"


def loss(log_probs, old_log_probs, mask, coef):
    return coef * ((log_probs - old_log_probs) ** 2 * mask).sum(1).mean()


ROWS = {"kl_tau, squared log-ratio to the sampler": loss}
