"""What a loss may be for: E[return], and a divergence of pi from another policy, as scalars.

Sums over distinct episodes at pi: their gradients are true ones, without a sampling error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from klrl.doctor.problems import Problem
from klrl.kl.divergences import over_actions

_NAMES = {
    "reverse": "the reverse KL(pi||{})",
    "forward": "the forward KL({}||pi)",
    "js": "the Jensen-Shannon divergence of pi and {}",
    "tv": "the total variation of pi and {}",
}
#: scope -> how the divergence of an episode comes about; the first is what its error is taken from.
VIEWS = {
    "sequence": {
        "whole": "whole episodes",
        "along": "each step on pi's way, later states counted",
    },
    "token": {
        "own": "each step alone, in the sampled states",
        "own_pi": "each step alone, in pi's own states",
    },
}


@dataclass(frozen=True)
class Aim:
    """One divergence, to be minimised."""

    divergence: str
    scope: str
    view: str  # one of VIEWS[scope]
    to: str = "ref"  # or old, the policy that sampled

    @property
    def short(self) -> str:
        """Its name."""
        return _NAMES[self.divergence].format(self.to)

    @property
    def words(self) -> str:
        """Its name, and of what."""
        return f"{self.short} of {VIEWS[self.scope][self.view]}"

    @property
    def options(self) -> str:
        """The command's words for it."""
        return f"--divergence {self.divergence} --scope {self.scope}"

    def value(self, problem: Problem) -> Tensor:
        """Its scalar at pi."""
        tables = problem.tables()
        other = tables[self.to]
        if self.view == "whole":
            log_p, log_q = (problem.log_episodes(table) for table in (tables["pi"], other))
            return over_actions(self.divergence, log_p, log_q)
        step = over_actions(self.divergence, tables["pi"], other)
        chance = problem.log_episodes(tables["old" if self.view == "own" else "pi"]).exp()
        if self.scope == "token":
            chance = chance.detach()  # how the states depend on pi is not counted
        return (chance * problem.along(step)).sum()


def aims(divergence: str, scope: str, to: str = "ref") -> tuple[Aim, ...]:
    """What ``--divergence`` and ``--scope`` may mean; one that is the same is left out."""
    views = [view for view in VIEWS[scope] if (divergence, view) != ("reverse", "along")]
    return tuple(Aim(divergence, scope, view, to) for view in views)


def surrogate(problem: Problem) -> Tensor:
    """E[A_old] of pi's actions in the sampled states (TRPO's): the return, each step alone."""
    numbers = problem.batch
    ratio = (numbers.log_probs - numbers.old_log_probs).exp()
    return (ratio * numbers.advantages).masked_fill(~numbers.mask, 0.0).sum(1).mean()


#: scope -> what the return may be, to be maximised; the first is what its error is taken from.
RETURNS: dict[str, dict[str, Callable[[Problem], Tensor]]] = {
    "sequence": {"E[return]": Problem.expected_return},
    "token": {"E[return]": Problem.expected_return, "E[A_old in the sampled states]": surrogate},
}
