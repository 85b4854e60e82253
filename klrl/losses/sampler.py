"""Corrections for responses that a sampling policy mu drew, which is not pi_old; tokens [B, R].

mu may be a different engine, precision or older weights. ``log_w`` is log pi_old - log mu of the
sampled tokens, 0 at padding. No weight has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klrl.kl.estimators import as_mask


class Limits(NamedTuple):
    """The limits of a weight; each rule reads one or two."""

    cap: float = math.inf
    low: float = 0.0
    high: float = math.inf


def truncate(log_w: Tensor, mask: Tensor, limits: Limits) -> Tensor:
    """min(w, cap), per token (Espeholt et al. 2018; Yao et al. 2025, "TIS")."""
    return log_w.exp().clamp_max(limits.cap)


def mask_tokens(log_w: Tensor, mask: Tensor, limits: Limits) -> Tensor:
    """w if low <= w <= high, else 0, per token (Zhao et al. 2025, "IcePop")."""
    w = log_w.exp()
    return w.masked_fill((w < limits.low) | (w > limits.high), 0.0)


def mask_response(log_w: Tensor, mask: Tensor, limits: Limits) -> Tensor:
    """rho = prod_t w_t of the response if rho <= cap, else 0 (Liu et al. 2025, "MIS")."""
    rho = log_w.sum(1, keepdim=True).exp()
    return rho.masked_fill(rho > limits.cap, 0.0).expand_as(log_w)


def mask_geometric(log_w: Tensor, mask: Tensor, limits: Limits) -> Tensor:
    """w; 0 in a response unless low <= (prod_t w_t)^(1/n) <= high, n its number of tokens."""
    mean = (log_w.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)).exp()
    return log_w.exp().masked_fill((mean < limits.low) | (mean > limits.high), 0.0)


Weight = Callable[[Tensor, Tensor, Limits], Tensor]
#: ``loss.sampler_weight`` -> its function, and its limits by default.
WEIGHTS: Mapping[str, tuple[Weight, Limits]] = {
    "truncate": (truncate, Limits(cap=2.0)),
    "mask": (mask_tokens, Limits(low=0.5, high=5.0)),
    "mask_response": (mask_response, Limits(cap=3.0)),
    "mask_geometric": (mask_geometric, Limits(low=0.99, high=1.01)),
}


@torch.no_grad()
def sampler_weight(
    name: str,
    old_log_prob: Tensor,
    log_mu: Tensor,
    mask: Tensor | None,
    limits: Sequence[float | None] = (None, None, None),
) -> Tensor:
    """Compute a weight of :data:`WEIGHTS`, [B, R]; ``limits``: cap, low, high, None for its own."""
    real = torch.ones_like(log_mu, dtype=torch.bool) if mask is None else as_mask(mask, log_mu)
    weight, default = WEIGHTS[name]
    chosen = Limits(*(d if x is None else x for x, d in zip(limits, default, strict=True)))
    return weight((old_log_prob - log_mu).masked_fill(~real, 0.0), real, chosen)


def binary_tv(log_prob: Tensor, log_mu: Tensor) -> Tensor:
    """|p - m|: total variation of the two events "this token" and "any other"."""
    return (log_prob.exp() - log_mu.exp()).abs()


def binary_kl(log_prob: Tensor, log_mu: Tensor) -> Tensor:
    """m log(m / p) + (1 - m) log((1 - m) / (1 - p)): KL(mu||pi) of the same two events."""
    tiny = torch.finfo(log_prob.dtype).eps
    p, m = (x.exp().clamp(tiny, 1 - tiny) for x in (log_prob, log_mu))
    return m * (m / p).log() + (1 - m) * ((1 - m) / (1 - p)).log()


#: ``loss.measure`` -> the divergence from (log p, log m) of the sampled tokens; the exact ones are
#: sums over the vocabulary, which the caller computes.
BINARY = {"tv": binary_tv, "kl": binary_kl}


@torch.no_grad()
def trusted(log_prob: Tensor, log_mu: Tensor, advantage: Tensor, far: Tensor) -> Tensor:
    """Return DPPO's M [B, R], bool (2026, arXiv:2602.04879, eq. 11 to 14).

    False where a token is ``far`` (its divergence from mu exceeds delta) and its gradient leads
    further: A > 0 and p > m, or A < 0 and p < m.
    """
    away = torch.where(advantage > 0, log_prob > log_mu, (log_prob < log_mu) & (advantage < 0))
    return ~(far & away)
