"""Gradients over whole episodes: per-step estimators, and placements."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from klrl.doctor.enumerable import Chain, chains, cosine, error
from klrl.doctor.lines import Line
from klrl.kl.estimators import ESTIMATORS
from klrl.losses.functional import reference_kl

#: KL of the chain -> relative error of the gradient, sequences of five tokens.
SEQUENCES = {0.20: (0.07, 0.18), 0.95: (0.19, 0.52), 2.2: (0.25, 0.95)}
#: KL of the chain -> cosines of exact, k2, k3 in the reward; error of exact in the loss.
PLACEMENTS = {
    0.10: ({"exact": 0.25, "k2": -0.46, "k3": -0.53}, 0.12),
    0.89: ({"exact": 0.45, "k2": 0.78, "k3": 0.54}, 0.20),
    1.90: ({"exact": -0.19, "k2": 0.20, "k3": -0.13}, 0.63),
}


def sequence_lines() -> Iterator[Line]:
    """Per-token and per-sequence estimators, |error| / |exact gradient|."""
    section = "Sequences (4^5 episodes): error of the gradient of KL(pi||ref)"
    source = "enumeration; published figures"
    for chain, (kl, (k2, k3)) in zip(chains(1, (0.3, 1.0, 2.0)), SEQUENCES.items(), strict=True):
        value, true = chain.kl()
        yield Line(section, f"KL of the chain {kl}", kl, float(value), 0.01, source)
        log_p, log_q, p = _terms(chain)
        ratio = log_p - log_q
        per_token = {"k2": k2, "k3": k3}
        for name, expected in per_token.items():
            off = error(_grad(chain, (p * ESTIMATORS[name](ratio).sum(1)).sum()), true)
            yield Line(section, f"  {name} per token in the loss", expected, off, 0.006, source)
        to_go = _to_go(ratio.detach())
        off = error(_grad(chain, (p * (to_go * log_p).sum(1)).sum()), true)
        yield Line(section, "  k1 in the reward, to go", 0.0, off, 1e-9, source)
        off = error(_grad(chain, (p * ESTIMATORS["k2"](ratio.sum(1))).sum()), true)
        yield Line(section, "  k2 per sequence in the loss", 0.0, off, 1e-9, source)


def placement_lines() -> Iterator[Line]:
    """The placements of the KL: in the reward-to-go, in the loss, or split between both."""
    section = "Placements (4^5 episodes), at pi_theta = pi_old"
    source = "enumeration; published figures"
    problems = zip(chains(0, (0.3, 0.8, 1.5)), PLACEMENTS.items(), strict=True)
    for chain, (kl, (cosines, loss_error)) in problems:
        value, true = chain.kl()
        yield Line(section, f"KL of the chain {kl}", kl, float(value), 0.01, source)
        log_p, log_q, p = _terms(chain)
        exact = chain.exact(chain.theta)
        penalties = {"exact": exact, **{k: e(log_p - log_q) for k, e in ESTIMATORS.items()}}

        def in_reward(kls: Tensor, log_p: Tensor = log_p) -> Tensor:
            return (_to_go(kls.detach()) * log_p).sum(1)

        off = error(_grad(chain, (p * in_reward(penalties["k1"])).sum()), true)
        yield Line(section, "  reward, k1: error", 0.0, off, 1e-9, source)
        for name, expected in cosines.items():
            aligned = cosine(_grad(chain, (p * in_reward(penalties[name])).sum()), true)
            yield Line(section, f"  reward, {name}: cosine", expected, aligned, 0.006, source)
        own_step = _grad(chain, (p * exact.sum(1)).sum())
        off = error(own_step, true)
        yield Line(section, "  loss, exact: error", loss_error, off, 0.006, source)
        for name in ESTIMATORS:
            kls = reference_kl(name, log_p, log_p.detach(), log_q).sum(1)
            off = error(_grad(chain, (p * kls).sum()), own_step)
            yield Line(section, f"  loss, {name} with the ratio: error of the own-step part",
                       0.0, off, 1e-9, source)  # fmt: skip
        split = (p * (in_reward(exact) + exact.sum(1))).sum()
        yield Line(section, "  split, exact: error", 0.0, error(_grad(chain, split), true), 1e-9,
                   source)  # fmt: skip


def _terms(chain: Chain) -> tuple[Tensor, Tensor, Tensor]:
    """log pi and log pi_ref [E, steps], probability of each episode [E]."""
    log_p, log_q = chain.log_probs(chain.theta), chain.log_probs(chain.ref)
    return log_p, log_q, log_p.sum(1).exp().detach()


def _to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum(1).flip(1)


def _grad(chain: Chain, value: Tensor) -> Tensor:
    return torch.autograd.grad(value, chain.theta, retain_graph=True)[0]
