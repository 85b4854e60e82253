"""The gradients of the divergences over whole episodes, all of them enumerated.

With u = pi_ref / pi, D = E_pi[f(u)], and J = E[sum_t D(s_t)]. A sampled reward has J's gradient
where an action is charged f(u) - u f'(u) at its own step (the gradient of p f(q / p) by p) and f(u)
at the later ones. For f = -log u the two differ by a constant, and so f(u) = k1 serves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.published.episodes import Chain, chains
from benchmarks.published.estimates import error, grad
from klrl.doctor.lines import Line
from klrl.kl.charge import to_go
from klrl.kl.divergences import over_actions

#: name -> f(u)
F: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse": lambda u: -u.log(),
    "forward": lambda u: u * u.log(),
    "js": lambda u: 0.5 * ((2 / (1 + u)).log() + u * (2 * u / (1 + u)).log()),
}
#: KL of the chain -> error of f(u) alone in the reward, of the own step alone in the loss.
ERRORS = {
    0.10: {"reverse": (0.0, 0.12), "forward": (2.286, 0.122), "js": (1.285, 0.125)},
    0.89: {"reverse": (0.0, 0.20), "forward": (1.985, 0.212), "js": (0.971, 0.211)},
}


def divergence_lines() -> Iterator[Line]:
    """Each divergence by its placements."""
    section = "Divergences (4^5 episodes), at pi_theta = pi_old: error of the gradient of J"
    source = "enumeration"
    for chain, (kl, errors) in zip(chains(0, (0.3, 0.8)), ERRORS.items(), strict=True):
        for name, (one_number, own_step) in errors.items():
            label = f"{name}, KL of the chain {kl}"
            value, true = enumerated(chain, F[name])
            per_step = per_state(chain, over_actions(name, *tables(chain)))
            mean = float((probabilities(chain) * per_step.detach().sum(1)).sum())
            yield Line(section, f"{label}: J", float(value), mean, 1e-9, source)
            log_p = chain.log_probs(chain.theta)
            later = (to_go(per_step.detach(), placement="split") * log_p).sum(1)
            off = error(chain.gradient(later + per_step.sum(1)), true)
            yield Line(section, f"{label}: split, exact", 0.0, off, 1e-9, source)
            off = error(chain.gradient(per_step.sum(1)), true)
            yield Line(section, f"{label}: loss, exact", own_step, off, 0.006, source)
            own, after = sampled(chain, F[name])
            off = error(chain.gradient(((own + after) * log_p).sum(1)), true)
            yield Line(section, f"{label}: reward, two numbers", 0.0, off, 1e-9, source)
            off = error(chain.gradient((to_go(own_number(chain, F[name])) * log_p).sum(1)), true)
            yield Line(section, f"{label}: reward, f(u)", one_number, off, 0.006, source)


def enumerated(chain: Chain, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """J, and its gradient with respect to theta: of the episodes' probabilities too."""
    log_p, log_q = tables(chain)
    d = (log_p.exp() * f((log_q - log_p).exp())).sum(-1)
    value = (probabilities(chain, held=False) * per_state(chain, d).sum(1)).sum()
    return value.detach(), grad(value, chain.theta)


def tables(chain: Chain) -> tuple[Tensor, Tensor]:
    """log pi and log pi_ref, [steps, states, actions]."""
    return chain.theta.log_softmax(-1), chain.ref.log_softmax(-1)


def per_state(chain: Chain, values: Tensor) -> Tensor:
    """Values [steps, states] at the states of every episode, [E, steps]."""
    return torch.stack([values[t, chain.state(t)] for t in range(len(values))], 1)


def probabilities(chain: Chain, held: bool = True) -> Tensor:
    """Of the episodes [E]; differentiable unless held."""
    p = chain.log_probs(chain.theta).sum(1).exp()
    return p.detach() if held else p


def own_number(chain: Chain, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f(u) of every action, [E, steps]."""
    log_p, log_q = (chain.log_probs(x).detach() for x in (chain.theta, chain.ref))
    return f((log_q - log_p).exp())


def sampled(chain: Chain, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(f(u) - u f'(u) of every action, the sum of f(u) after it), [E, steps] each."""
    log_p, log_q = (chain.log_probs(x).detach() for x in (chain.theta, chain.ref))
    u = (log_q - log_p).exp().requires_grad_()
    values = f(u)
    slope = grad(values.sum(), u)
    u, values = u.detach(), values.detach()
    return values - u * slope, to_go(values, placement="split")
