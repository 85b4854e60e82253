"""Policies whose every action or episode can be enumerated, so that expectations are sums.

The random problems of the gradient and sequence tables are those of the published figures: the same
generator, seed and order of draws. The placement table's problem is not published: its chain was
found by searching seeds and scales for the three published KLs, and the twelve published gradient
figures, which were not part of the search, then agreed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

DOUBLE = torch.float64


def softmax_pairs(scales: tuple[float, ...], actions: int = 50) -> list[tuple[Tensor, Tensor]]:
    """Logits (policy, reference) at growing distance; one step of many actions."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for scale in scales:
        ref = torch.randn(actions, dtype=DOUBLE, generator=generator)
        pairs.append((ref + scale * torch.randn(actions, dtype=DOUBLE, generator=generator), ref))
    return pairs


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two gradients of any shape."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def error(estimate: Tensor, true: Tensor) -> float:
    """|estimate - true| / |true|."""
    return float((estimate - true).norm() / true.norm())


@dataclass
class Chain:
    """A Markov chain of ``steps`` actions: the state is the last action, the first state is 0.

    Attributes:
        theta: the policy's logits [steps, states, actions], differentiable.
        ref: the reference's logits, the same shape.
        episodes: every sequence of actions [E, steps].
    """

    theta: Tensor
    ref: Tensor
    episodes: Tensor

    def log_probs(self, logits: Tensor) -> Tensor:
        """log pi(a_t|s_t) of every episode, [E, steps]."""
        log_p = logits.log_softmax(-1)
        return torch.stack(
            [log_p[t, self.state(t), self.episodes[:, t]] for t in range(log_p.shape[0])], 1
        )

    def state(self, step: int) -> Tensor:
        """The state before a step, per episode."""
        if step == 0:
            return torch.zeros(len(self.episodes), dtype=torch.long)
        return self.episodes[:, step - 1]

    def exact(self, logits: Tensor) -> Tensor:
        """KL(pi||ref) at the state of each step of each episode, [E, steps]."""
        log_p, log_q = logits.log_softmax(-1), self.ref.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        return torch.stack([kl[t, self.state(t)] for t in range(kl.shape[0])], 1)

    def kl(self) -> tuple[Tensor, Tensor]:
        """KL of whole episodes and its gradient with respect to theta."""
        log_p, log_q = self.log_probs(self.theta), self.log_probs(self.ref)
        value = (log_p.sum(1).exp() * (log_p - log_q).sum(1)).sum()
        return value.detach(), torch.autograd.grad(value, self.theta)[0]


def chains(seed: int, scales: tuple[float, ...], actions: int = 4, steps: int = 5) -> list[Chain]:
    """Chains at growing distance from their references."""
    generator = torch.Generator().manual_seed(seed)
    episodes = torch.tensor(list(product(range(actions), repeat=steps)))
    shape = (steps, actions, actions)
    result = []
    for scale in scales:
        ref = torch.randn(shape, dtype=DOUBLE, generator=generator)
        theta = ref + scale * torch.randn(shape, dtype=DOUBLE, generator=generator)
        result.append(Chain(theta.requires_grad_(), ref, episodes))
    return result
