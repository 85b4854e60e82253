"""Checks a dozen numbers of klrl's one-step KL against expectations that are computed as sums.

``python -m benchmarks.ranges`` checks more numbers, and computes the published figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from klrl.doctor.lines import KnownNumber
from klrl.kl.estimators import ESTIMATORS, exact_kl
from klrl.objectives.functional import reference_kl

#: Number of actions; standard deviation of the logits' differences, pi_ref and pi_old to pi_theta.
_ACTIONS, _REF, _OLD = 50, 1.0, 0.3


def number_lines() -> Iterator[KnownNumber]:
    """Yield errors of the estimators, then of their gradients in reward and loss, all relative."""
    generator = torch.Generator().manual_seed(0)
    ref, away, step = torch.randn(3, _ACTIONS, dtype=torch.float64, generator=generator)
    theta = (ref + _REF * away).requires_grad_()
    log_p, log_q, log_old = (x.log_softmax(0) for x in (theta, ref, theta + _OLD * step))
    p, old, ratio = log_p.exp().detach(), log_old.exp().detach(), log_p - log_q
    true = (log_p.exp() * ratio).sum()
    gradient = _grad(true, theta)

    def line(section: str, name: str, expected: float, found: Tensor) -> KnownNumber:
        return KnownNumber(
            section, name, expected, float(found.detach()), 1e-9, "sums over 50 actions"
        )

    section = "KL(pi||ref): relative error of the expectation"
    dists = (torch.distributions.Categorical(logits=x) for x in (theta, ref))
    yield line(section, "exact", 0.0, exact_kl(*dists) / true - 1)
    for name in ("k1", "k3"):
        yield line(section, name, 0.0, (p * ESTIMATORS[name](ratio)).sum() / true - 1)
    bias = float((p * 0.5 * ratio.detach() ** 2).sum() / true.detach() - 1)
    yield line(section, "k2, which is biased", bias, (p * ESTIMATORS["k2"](ratio)).sum() / true - 1)

    section = "Its gradient, actions of pi_theta"
    losses = {
        "k1 in the reward": p * ESTIMATORS["k1"](ratio).detach() * log_p,
        "k2 in the loss": p * ESTIMATORS["k2"](ratio),
    }
    for name, loss in losses.items():
        yield line(section, name, 0.0, _error(_grad(loss.sum(), theta), gradient))
    zero = _grad((p * ESTIMATORS["k1"](ratio)).sum(), theta).norm() / gradient.norm()
    yield line(section, "k1 in the loss, which has none", 0.0, zero)

    section = "Its gradient in the loss, actions of pi_old"
    for name in ESTIMATORS:
        loss = old * reference_kl(name, log_p, log_old.detach(), log_q)
        yield line(
            section, f"{name} with the ratio", 0.0, _error(_grad(loss.sum(), theta), gradient)
        )


def _grad(value: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(value, at, retain_graph=True)[0]


def _error(estimate: Tensor, true: Tensor) -> Tensor:
    return (estimate - true).norm() / true.norm()
