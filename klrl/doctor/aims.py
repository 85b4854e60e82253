"""Defines the terms that a loss may minimise: minus E[return], and divergences of pi.

Each term is a sum over all episodes of a small problem, so its gradient has no sampling error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from klrl.doctor.problems import Problem
from klrl.kl.divergences import over_actions

_NAMES = {
    "reverse": "the reverse KL(pi||{0}) of {1}",
    "forward": "the forward KL({0}||pi) of {1}",
    "js": "the Jensen-Shannon divergence between pi and {0}, of {1}",
    "tv": "the total variation between pi and {0}, of {1}",
}
#: Scope -> its meanings. A loss with the gradient of any meaning is right; a loss with the gradient
#: of none is compared with the first meaning.
_OF = {
    "sequence": {"whole": "whole episodes", "along": "each step, with its effect on later states"},
    "token": {
        "own": "each step alone, in the sampled states",
        "own_pi": "each step alone, in pi's own states",
    },
}


@dataclass(frozen=True)
class Aim:
    """A term to be minimised: minus E[return], or a divergence."""

    what: str  # return, or a divergence
    scope: str  # sequence or token
    of: str  # a key of _OF[scope]
    to: str = "ref"  # the policy with which pi is compared: ref, or old, which samples

    @property
    def words(self) -> str:
        """The term in words."""
        if self.what == "return":
            own = "E[A_old of pi's actions in the sampled states]"
            return own if self.of == "own" else "E[return]"
        return _NAMES[self.what].format(self.to, _OF[self.scope][self.of])

    def gradient(self, problem: Problem) -> Tensor:
        """Compute the term's exact gradient with respect to the parameters of pi, flattened."""
        if self not in problem.kept:
            (grad,) = torch.autograd.grad(self.value(problem), problem.policy.weight)
            problem.kept[self] = grad.flatten()
        return problem.kept[self]

    def value(self, problem: Problem) -> Tensor:
        """Compute the term, differentiable in the parameters of pi."""
        if self.what == "return":
            return -(problem.surrogate() if self.of == "own" else problem.expected_return())
        tables = problem.tables()
        log_p, log_q = tables["pi"], tables[self.to]
        if self.of == "whole":
            log_p, log_q = problem.log_episodes(log_p), problem.log_episodes(log_q)
            return over_actions(self.what, log_p, log_q)
        chance = problem.log_episodes(tables["old"] if self.of == "own" else log_p).exp()
        if self.scope == "token":
            chance = chance.detach()  # no gradient through the probabilities of the states
        return (chance * problem.along(over_actions(self.what, log_p, log_q))).sum()


def aims(what: str, scope: str, to: str = "ref") -> list[Aim]:
    """List the terms of ``what`` in ``scope``; a loss may minimise any of them."""
    return [Aim(what, scope, of, to) for of in _OF[scope]]
