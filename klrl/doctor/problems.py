"""Small problems on which the expected gradient of a user's loss is an exact sum.

The sampling policy's probabilities are multiples of ``1 / tickets``, so that there is a batch which
contains every episode in proportion to its probability: the gradient of a loss on this batch is its
expected gradient, without a sampling error. The true gradient is computed separately, by autograd
of the objective, a sum over distinct episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from klrl.kl.charge import on_last, shaped, to_go
from klrl.kl.divergences import over_actions

DOUBLE = torch.float64
#: Fewest rollouts N in a batch: many, since a leave-one-out baseline scales gradients by N/(N-1).
EPISODES = 1296
#: Standard deviation of an update of each logit: so large that some ratios exceed PPO's bounds.
UPDATE = 0.25


@dataclass(frozen=True)
class Kind:
    """The sizes of a problem."""

    name: str  # as printed
    starts: int  # number of initial states, all equally likely
    actions: int  # per state
    steps: int  # most steps of an episode
    tickets: int  # probabilities are multiples of 1 / tickets
    #: Whether action 0 ends an episode, as an EOS token does; padding follows it, and the only
    #: reward is a score on the last token.
    ends: bool = False
    halves: bool = False  # whether episodes from the last start have half of the steps

    @property
    def states(self) -> int:
        """The number of states: one per start, then one per later step and previous action."""
        return self.starts + (self.steps - 1) * self.actions


KINDS = (
    Kind("one step", starts=2, actions=4, steps=1, tickets=16),
    Kind("three steps", starts=2, actions=3, steps=3, tickets=6),
    Kind("variable lengths", starts=1, actions=3, steps=4, tickets=6, ends=True),
)


@dataclass(frozen=True)
class Rollouts:
    """States, actions and mask of N episodes, [N, steps] each."""

    states: Tensor  # before each action
    actions: Tensor
    mask: Tensor  # bool; False is padding, after the episode's end

    def rows(self, index: Tensor) -> Rollouts:
        """Some of the episodes."""
        return Rollouts(self.states[index], self.actions[index], self.mask[index])


class LogitTable(nn.Module):
    """A policy: from observations [..., states], one-hot, to its log-probs [..., actions]."""

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(log_probs)

    def forward(self, observation: Tensor) -> Tensor:
        """The logits."""
        return observation @ self.weight


@dataclass(frozen=True)
class Numbers(Rollouts):
    """The tensors of a batch that a loss may take, [N, steps], in nats or reward units.

    Outside the mask rewards are 0, and all else is arbitrary.
    """

    problem: Problem
    logits: Tensor  # log pi_theta of every action, [N, steps, actions], differentiable
    ref_logits: Tensor  # log pi_ref, likewise
    old_logits: Tensor  # log pi_old, of the policy that sampled; equals ``logits`` if not stale
    rewards: Tensor  # less coef * KL, where the placement charges rewards
    advantages: Tensor  # rewards to go, minus their mean in that state

    @property
    def log_probs(self) -> Tensor:
        """Log pi_theta of the actions taken, differentiable."""
        return self.of_actions(self.logits)

    @property
    def old_log_probs(self) -> Tensor:
        """Log pi_old of the actions taken."""
        return self.of_actions(self.old_logits)

    @property
    def ref_log_probs(self) -> Tensor:
        """Log pi_ref of the actions taken."""
        return self.of_actions(self.ref_logits)

    def of_actions(self, logits: Tensor) -> Tensor:
        """Select the values of the actions taken, [N, steps]."""
        return logits.gather(-1, self.actions[..., None]).squeeze(-1)

    def scored(self, score: Tensor) -> Tensor:
        """Return the gradient of score * log pi(action) at the logits inside the mask."""
        chosen = one_hot(self.actions, self.logits.shape[-1])
        return (score[..., None] * (chosen - self.logits.exp()))[self.mask].detach()

    def at_table(self, at: Tensor) -> Tensor:
        """Convert a gradient at the logits in the mask to the table's mean over episodes, flat."""
        table = torch.zeros(self.problem.kind.states, at.shape[-1], dtype=DOUBLE)
        table.index_add_(0, self.states[self.mask], at)
        return table.flatten() / len(self.mask)

    def other_padding(self) -> Numbers:
        """Return a copy with different numbers outside the mask, and without a gradient there."""

        def changed(x: Tensor) -> Tensor:
            mask = self.mask if x.ndim == self.mask.ndim else self.mask[..., None]
            return torch.where(mask, x, 2 * x.detach() - 1)

        logits, ref, old = map(changed, (self.logits, self.ref_logits, self.old_logits))
        advantages = changed(self.advantages)
        return replace(self, logits=logits, ref_logits=ref, old_logits=old, advantages=advantages)


class Problem:
    """One random problem: its probabilities and rewards come from ``seed``.

    ``policy`` is pi_theta, ``stale`` random updates away from pi_old, which sampled; ``ref`` is
    pi_ref. ``everything`` contains each episode in proportion to its probability under pi_old.
    """

    def __init__(self, kind: Kind, seed: int, divergence: str = "reverse", stale: int = 0) -> None:
        self.kind, self.divergence, self.stale = kind, divergence, stale
        self._generator = torch.Generator().manual_seed(seed)
        counts, log_q, self._rewards, log_p = self._drawn()
        self._old = (counts.to(DOUBLE) / kind.tickets).log()
        self.policy, self.ref = LogitTable(log_p), LogitTable(log_q).requires_grad_(False)
        self.everything = _everything(kind, counts)
        self.kept: dict[object, Tensor] = {}  # cache: aim -> true gradient

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tickets of pi_old, log pi_ref, rewards, log pi, each [states, actions]."""
        kind, generator = self.kind, self._generator
        shape = (kind.states, kind.actions)
        counts = _compositions(kind, generator)
        log_p = (counts.to(DOUBLE) / kind.tickets).log()
        distance = 0.3 + 1.2 * torch.rand((), dtype=DOUBLE, generator=generator)
        noise = torch.randn(shape, dtype=DOUBLE, generator=generator)
        log_q = (log_p + distance * noise).log_softmax(-1)
        rewards = torch.randn(shape, dtype=DOUBLE, generator=generator)
        for _ in range(self.stale):
            move = torch.randn(shape, dtype=DOUBLE, generator=generator)
            log_p = (log_p + UPDATE * move).log_softmax(-1)
        return counts, log_q, rewards, log_p

    def sample(self) -> Rollouts:
        """Draw as many episodes of pi_old as :attr:`everything` has."""
        count = len(self.everything.mask)
        return self.everything.rows(torch.randint(count, (count,), generator=self._generator))

    def numbers(self, episodes: Rollouts, coef: float, placement: str = "loss") -> Numbers:
        """Return the tensors that a loss may take; ``coef`` in reward per nat.

        With ``placement="loss"`` rewards are not charged. With ``split`` each step's reward is
        charged the exact ``divergence``; advantages contain only that of later steps. With
        ``reward`` each step's reward is charged k1.
        """
        tables = self.tables()
        states = episodes.states
        rewards, gains = self._charged(episodes, coef, placement)
        _, of_all = self._charged(self.everything, coef, placement)
        advantages = gains - mean_by_state(of_all, self.everything, self.kind.states)[states]
        pi, ref, old = (tables[name][states] for name in ("pi", "ref", "old"))
        return Numbers(
            **vars(episodes), problem=self, logits=pi, ref_logits=ref, old_logits=old,
            rewards=rewards, advantages=advantages,
        )  # fmt: skip

    @cached_property
    def batch(self) -> Numbers:
        """The tensors of :attr:`everything`, not charged."""
        return self.numbers(self.everything, 0.0)

    def expected_return(self) -> Tensor:
        """E[return] of pi_theta, a sum over distinct episodes."""
        chance = self.log_episodes(self.tables()["pi"]).exp()
        return (chance * self.raw_rewards(_distinct(self.kind)).sum(1)).sum()

    def surrogate(self) -> Tensor:
        """TRPO's surrogate: E[A_old] of pi's actions in the states that pi_old sampled."""
        numbers = self.batch
        ratio = (numbers.log_probs - numbers.old_log_probs).exp()
        return (ratio * numbers.advantages).masked_fill(~numbers.mask, 0.0).sum(1).mean()

    def log_episodes(self, table: Tensor) -> Tensor:
        """Log of the probability of each distinct episode under a table of log-probs."""
        episodes = _distinct(self.kind)
        steps = table[episodes.states, episodes.actions].masked_fill(~episodes.mask, 0.0)
        return steps.sum(1) - math.log(self.kind.starts)

    def along(self, values: Tensor) -> Tensor:
        """Sum ``values`` [states] over the steps of each distinct episode."""
        episodes = _distinct(self.kind)
        return values[episodes.states].masked_fill(~episodes.mask, 0.0).sum(1)

    def raw_rewards(self, episodes: Rollouts) -> Tensor:
        """Return the rewards before any charge, 0 outside the mask."""
        rewards = self._rewards[episodes.states, episodes.actions]
        if not self.kind.ends:
            return rewards.masked_fill(~episodes.mask, 0.0)
        last = episodes.mask.sum(1, keepdim=True) - 1
        return on_last(rewards.gather(1, last).squeeze(1), episodes.mask)

    def tables(self) -> dict[str, Tensor]:
        """Log-probs of pi, which is differentiable, of ref and of old, [states, actions]."""
        log_p, log_q = (each.weight.log_softmax(-1) for each in (self.policy, self.ref))
        # If not stale, old is pi itself, so that the ratio is 1 to the bit.
        return {"pi": log_p, "ref": log_q, "old": self._old if self.stale else log_p.detach()}

    def _charged(self, episodes: Rollouts, coef: float, placement: str) -> tuple[Tensor, Tensor]:
        """Return charged rewards, and their sums to go."""
        raw, mask = self.raw_rewards(episodes), episodes.mask
        tables = self.tables()
        log_p, log_q = tables["old"], tables["ref"].detach()
        if placement == "split":
            kl = over_actions(self.divergence, log_p, log_q)[episodes.states]
        else:
            kl = (log_p - log_q)[episodes.states, episodes.actions]
        gains = shaped(to_go(raw, mask), to_go(kl, mask, placement), coef)
        if placement == "loss":
            return raw, gains
        return shaped(raw, kl.masked_fill(~mask, 0.0), coef), gains


def _compositions(kind: Kind, generator: torch.Generator) -> Tensor:
    """Draw the tickets of each action, [states, actions], at least 1: a random split per state."""
    rows = []
    for _ in range(kind.states):
        cuts = torch.randperm(kind.tickets - 1, generator=generator)[: kind.actions - 1] + 1
        ends = [0, *sorted(cuts.tolist()), kind.tickets]
        rows.append([high - low for low, high in pairwise(ends)])
    return torch.tensor(rows)


def _everything(kind: Kind, counts: Tensor) -> Rollouts:
    """Enumerate all draws of a start and a ticket per step, repeated to at least EPISODES."""
    actions = torch.arange(kind.actions)
    action_of = torch.stack([actions.repeat_interleave(row) for row in counts])
    draws = _draws(kind.starts, kind.tickets, kind.steps)
    return _walk(kind, draws.repeat(math.ceil(EPISODES / len(draws)), 1), action_of)


@cache
def _distinct(kind: Kind) -> Rollouts:
    """Each episode once."""
    draws = _draws(kind.starts, kind.actions, kind.steps)
    episodes = _walk(kind, draws, torch.arange(kind.actions).expand(kind.states, -1))
    # In padding the action is 0, so draws with other actions there repeat an episode.
    return episodes.rows((episodes.actions == draws[:, 1:]).all(1))


@cache
def _draws(starts: int, outcomes: int, steps: int) -> Tensor:
    """Every start with every sequence of outcomes, [N, 1 + steps]."""
    return torch.cartesian_prod(torch.arange(starts), *[torch.arange(outcomes)] * steps)


def _walk(kind: Kind, draws: Tensor, action_of: Tensor) -> Rollouts:
    """Follow draws [N, 1 + steps] by ``action_of`` [states, outcomes]; action 0 after the end."""
    state, alive = draws[:, 0], torch.ones(len(draws), dtype=torch.bool)
    states, actions, mask = [], [], []
    for step in range(kind.steps):
        action = action_of[state, draws[:, 1 + step]].where(alive, 0)
        states.append(state)
        actions.append(action)
        mask.append(alive)
        if kind.ends:
            alive = alive & (action != 0)
        elif kind.halves and 2 * (step + 1) >= kind.steps:
            alive = alive & (draws[:, 0] != kind.starts - 1)
        state = kind.starts + step * kind.actions + action
    return Rollouts(*(torch.stack(x, 1) for x in (states, actions, mask)))


def mean_by_state(values: Tensor, episodes: Rollouts, states: int) -> Tensor:
    """Average values [N, steps] in each state; 1 in states that occur only in padding."""
    at, values = episodes.states[episodes.mask], values[episodes.mask]
    count = torch.zeros(states, dtype=DOUBLE).index_add(0, at, torch.ones_like(values))
    total = torch.zeros(states, dtype=DOUBLE).index_add(0, at, values)
    return torch.where(count > 0, total / count.clamp_min(1), 1.0)
