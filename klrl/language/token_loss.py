"""PPO's losses per token, and the three places where KL(policy || reference) is charged.

B responses of at most R tokens, ``mask`` [B, R] bool where they are real; nats. Everything is pure.
w = pi_theta / pi_old of a token. The terms are those of :mod:`klrl.losses.functional`; which
estimator may stand where is docs/kl.md's table.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from klrl.config.placement import check_placement as check_placement
from klrl.kl.charge import to_go as kl_to_go  # noqa: F401  (this module's name for it)
from klrl.kl.estimators import estimate_kl, masked_mean, sequence_mean
from klrl.losses import functional as terms


def token_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens, padding counts nowhere: every token weighs the same."""
    return masked_mean(value, mask)


REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_mean,
    "sequence": sequence_mean,
}


def clip_gain(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, epsilon: float
) -> Tensor:
    """min(w A, clip(w, 1 - eps, 1 + eps) A) per token, [B, R] (Schulman et al. 2017, eq. 7)."""
    log_prob, old_log_prob = _real(mask, log_prob, old_log_prob)
    return terms.clipped_surrogate(log_prob, old_log_prob, _real(mask, advantage)[0], epsilon)


def klpen_gain(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    kl_old: Tensor,
    mask: Tensor,
    beta: float | Tensor,
) -> Tensor:
    """W A - beta KL(old||new) per token, [B, R] (Schulman et al. 2017, eq. 8).

    Args:
        log_prob: log pi_theta [B, R].
        old_log_prob: log pi_old [B, R].
        advantage: [B, R].
        kl_old: KL(old||new) [B, R], from :func:`sampled_kl_old` or exact.
        mask: [B, R].
        beta: of KL(old||new).
    """
    log_prob, old_log_prob, advantage, kl_old = _real(
        mask, log_prob, old_log_prob, advantage, kl_old
    )
    return terms.surrogate(log_prob, old_log_prob, advantage) - beta * kl_old


def sampled_kl_old(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """KL(old||new) per token by k3, [B, R] nats, 0 at padding.

    With r = log pi_old - log pi_theta and tokens of pi_old, exp(-r) - 1 + r = w - 1 - log w is
    unbiased and >= 0, and its gradient is the KL's: E_old[grad w] = 0 leaves -E_old[grad log pi].
    """
    return estimate_kl(old_log_prob, log_prob, "k3", mask)


def reference_penalty(
    estimator: str,
    log_prob: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor,
    exact: Tensor | None,
    mask: Tensor,
) -> Tensor:
    """KL(pi_theta || pi_ref) per token as the loss charges it, [B, R]; its gradient is the KL's.

    ``exact`` as it is; w r for k1 and w k3(r) with w differentiable, w.detach() r^2 / 2 for k2.

    Args:
        estimator: k1, k2, k3 or exact.
        log_prob: log pi_theta [B, R].
        old_log_prob: log pi_old [B, R].
        ref_log_prob: log pi_ref [B, R].
        exact: the exact KL [B, R] with its gradient, which ``exact`` needs.
        mask: [B, R].

    Raises:
        ValueError: ``exact`` without one.
    """
    if estimator == "exact":
        if exact is None:
            raise ValueError("estimator=exact: the exact KL is missing")
        return _real(mask, exact)[0]
    return terms.reference_kl(estimator, *_real(mask, log_prob, old_log_prob, ref_log_prob))


def critic_distance(
    value: Tensor,
    target: Tensor,
    old_value: Tensor,
    mask: Tensor,
    kind: str = "l2",
    clip_value: float | None = None,
) -> Tensor:
    """Distance of the value to its target per token, [B, R]; see ``functional.critic_loss``."""
    value, target, old_value = _real(mask, value, target, old_value)
    return terms.critic_loss(value, target, old_value, kind, clip_value)


def _real(mask: Tensor, *values: Tensor) -> list[Tensor]:
    """Zeros at padding, which may hold anything: it must not reach a sum, nor a gradient."""
    return [value.masked_fill(~mask, 0.0) for value in values]
