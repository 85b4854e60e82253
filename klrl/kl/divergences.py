"""Divergences of policy and reference in a state.

With u = pi_ref(a|s) / pi(a|s), each divergence is D = E_pi[f(u)], in nats:

    reverse   KL(pi || pi_ref)   f(u) = -log u
    forward   KL(pi_ref || pi)   f(u) = u log u
    js        Jensen-Shannon     f(u) = (log(2 / (1 + u)) + u log(2 u / (1 + u))) / 2, at most log 2
    tv        total variation    f(u) = |1 - u| / 2, at most 1 (unitless); measured, never charged

A bijection of the actions changes no divergence. So two TanhNormals with equal bounds have the
divergence of their Gaussians. The KLs of independent heads or dimensions of an action add up; their
js and tv do not. A run charges the divergence of each step or token; the sum of these js is not the
js of whole episodes or responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

from klrl.config.placement import DIVERGENCES

#: The largest Jensen-Shannon divergence, nats: that of two policies without a common action.
LARGEST_JS = math.log(2)
#: The divergences with a name; those in :data:`klrl.config.placement.DIVERGENCES` can be charged.
MEASURED = (*DIVERGENCES, "tv")


#: The name of a divergence; or the user's f of l = log pi - log pi_ref, for D = E_pi[f(l)].
Which: TypeAlias = str | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Divergence:
    """The divergence that a run charges."""

    name: Which = "reverse"  # reverse, forward or js; or a function of the log-ratio
    samples: int = 16  # draws per state, if there is no closed form (js: from each policy)

    @property
    def is_reverse(self) -> bool:
        """Whether this is KL(pi || pi_ref), the KL that k1, k2 and k3 estimate."""
        return self.name == "reverse"


REVERSE = Divergence()


def over_actions(name: Which, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute a divergence of two categoricals by a sum over all K actions (or tokens).

    Args:
        name: one of :data:`MEASURED`; or a function of the log-ratio.
        log_p: log pi, normalised, [..., K]; -inf at an action that pi forbids.
        log_q: log pi_ref, the same shape.

    Returns:
        [...], nats (tv: unitless), float32 or wider; reverse and forward may be infinite.
    """
    # Probabilities in half precision do not sum to 1: normalise them again.
    log_p, log_q = (
        x.float().log_softmax(-1) if x.dtype in (torch.bfloat16, torch.float16) else x
        for x in (log_p, log_q)
    )
    if not isinstance(name, str):
        forbidden = log_p == -torch.inf
        # A p that rounds to 0 counts as the smallest float: if f is inf, 0 * f would be NaN.
        least = math.log(torch.finfo(log_p.dtype).tiny)
        log_q = torch.where(log_p < least, log_q.clamp(min=least), log_q)
        log_p = torch.where(forbidden, log_p, log_p.clamp(min=least))
        return expected(log_p, name((log_p - log_q).masked_fill(forbidden, 0.0)))
    if name == "reverse":
        return expected(log_p, log_p - log_q)
    if name == "forward":
        return expected(log_q, log_q - log_p)
    require_known(name)
    if name == "tv":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    # Mask the actions that both policies forbid, since logaddexp's gradient would be NaN there.
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_p0, log_q0 = log_p.masked_fill(neither, 0.0), log_q.masked_fill(neither, 0.0)
    log_m = torch.logaddexp(log_p0, log_q0) - math.log(2)  # m = (pi + pi_ref) / 2
    # js = (KL(pi || m) + KL(pi_ref || m)) / 2  (Lin 1991)
    return 0.5 * (expected(log_p, log_p - log_m) + expected(log_q, log_q - log_m))


def expected(log_p: Tensor, value: Tensor) -> Tensor:
    """Compute sum_a p(a) value(a), inf if a value is; what p forbids adds 0, without gradient."""
    value = value.masked_fill(log_p == -torch.inf, 0.0)
    infinite = value == torch.inf
    terms = log_p.exp() * value.masked_fill(infinite, 0.0)  # 0 * inf would be NaN
    return terms.masked_fill(infinite, torch.inf).sum(-1)


def js_draws(at_policy: Tensor, at_reference: Tensor) -> Tensor:
    """Estimate the js without bias, nats, from each of S pairs of draws; tensors are [..., S].

    With l = log pi - log pi_ref, js = log 2 - (E_pi[softplus(-l)] + E_pi_ref[softplus(l)]) / 2. The
    arguments are l at draws of pi and at draws of pi_ref; a gradient needs reparametrised draws.
    """
    return LARGEST_JS - 0.5 * (softplus(-at_policy) + softplus(at_reference))


def tv_draws(at_policy: Tensor, at_reference: Tensor) -> Tensor:
    """Estimate the total variation without bias, in [0, 1]; arguments as in :func:`js_draws`.

    tv = E_m[tanh(|l| / 2)] with m = (pi + pi_ref) / 2, since |pi - pi_ref| / (2 m) = tanh(|l| / 2).
    """
    return 0.5 * ((0.5 * at_policy.abs()).tanh() + (0.5 * at_reference.abs()).tanh())


def standard_error(draws: Tensor) -> Tensor:
    """Compute the standard error of the mean over S draws, [..., S] -> [...]; NaN for S = 1."""
    return draws.std(-1) / math.sqrt(draws.shape[-1])


def require_known(name: str) -> None:
    """Refuse an unknown divergence."""
    if name not in MEASURED:
        raise ValueError(f"divergence={name}: choose one of {', '.join(MEASURED)}")
