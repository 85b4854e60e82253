"""Small problems on which the expected gradient of a user's loss is an exact sum.

The sampling policy's probabilities are multiples of ``1 / tickets``. So one batch can contain every
episode in proportion to its probability; a loss's gradient on this batch is its expected gradient.
The true gradient comes from autograd through the objective, a sum over distinct episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from klrl.kl.charge import on_last, to_go
from klrl.kl.divergences import over_actions

DOUBLE = torch.float64
#: Minimum number N of episodes; large, so that a leave-one-out baseline's N/(N-1) is near 1.
EPISODES = 1296
#: Standard deviation of a random update of a logit; large, so that some ratios exceed PPO's clip.
UPDATE = 0.25


@dataclass(frozen=True)
class Kind:
    """The sizes of a problem."""

    name: str  # as printed
    starts: int  # number of initial states, all equally likely
    actions: int  # per state
    steps: int  # maximum number of steps of an episode
    tickets: int  # pi_old's probabilities are multiples of 1 / tickets
    #: Whether action 0 ends an episode, as an EOS token does. If so, only the last step of an
    #: episode has a reward, and padding follows this step.
    ends: bool = False
    halves: bool = False  # whether episodes from the last start are half as long

    @property
    def states(self) -> int:
        """The number of states: the starts, and for each later step one per previous action."""
        return self.starts + (self.steps - 1) * self.actions


KINDS = (
    Kind("one step", starts=2, actions=4, steps=1, tickets=16),
    Kind("three steps", starts=2, actions=3, steps=3, tickets=6),
    Kind("variable lengths", starts=1, actions=3, steps=4, tickets=6, ends=True),
)


@dataclass(frozen=True)
class Rollouts:
    """Tensors [N, steps] of N episodes."""

    states: Tensor  # number of the state before each action
    actions: Tensor
    mask: Tensor  # bool; False is padding, after the episode's end

    def rows(self, index: Tensor) -> Rollouts:
        """Select the episodes with these indices."""
        return Rollouts(self.states[index], self.actions[index], self.mask[index])


class LogitTable(nn.Module):
    """A policy: maps one-hot observations [..., states] to logits [..., actions]."""

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(log_probs)

    def forward(self, observation: Tensor) -> Tensor:
        """Compute the logits."""
        return observation @ self.weight


@dataclass(frozen=True)
class Numbers(Rollouts):
    """A batch: the tensors [N, steps] that a loss may take, in nats or units of reward.

    Outside the mask, rewards are 0 and all other values are arbitrary.
    """

    problem: Problem
    logits: Tensor  # log pi_theta of every action, [N, steps, actions], differentiable
    ref_logits: Tensor  # log pi_ref of every action
    old_logits: Tensor  # log pi_old of every action; equals ``logits`` if the problem is not stale
    rewards: Tensor  # with coef * KL subtracted, if the placement charges rewards
    advantages: Tensor  # sums of rewards to come, minus their mean in the state

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
        """Return the gradient of score * log pi(action) at the logits in the mask, [M, actions]."""
        chosen = one_hot(self.actions, self.logits.shape[-1])
        return (score[..., None] * (chosen - self.logits.exp()))[self.mask].detach()

    def at_table(self, at: Tensor) -> Tensor:
        """Sum gradients at the logits, [M, actions], by state; divide by N episodes; flatten."""
        table = torch.zeros(self.problem.kind.states, at.shape[-1], dtype=DOUBLE)
        table.index_add_(0, self.states[self.mask], at)
        return table.flatten() / len(self.mask)

    def other_padding(self) -> Numbers:
        """Return a copy with different, detached logits and advantages outside the mask."""

        def changed(x: Tensor) -> Tensor:
            mask = self.mask if x.ndim == self.mask.ndim else self.mask[..., None]
            return torch.where(mask, x, 2 * x.detach() - 1)

        logits, ref, old = map(changed, (self.logits, self.ref_logits, self.old_logits))
        advantages = changed(self.advantages)
        return replace(self, logits=logits, ref_logits=ref, old_logits=old, advantages=advantages)


class Problem:
    """One random problem: ``seed`` determines its probabilities and rewards.

    ``policy`` is pi_theta, which is pi_old after ``stale`` random updates; ``ref`` is pi_ref.
    ``everything`` contains each episode in proportion to its probability under pi_old, the sampling
    policy; ``distinct`` contains each episode once.
    """

    def __init__(self, kind: Kind, seed: int, divergence: str = "reverse", stale: int = 0) -> None:
        self.kind, self.divergence, self.stale = kind, divergence, stale
        self._generator = torch.Generator().manual_seed(seed)
        counts, log_q, self._rewards, log_p = self._drawn()
        self._old = (counts.to(DOUBLE) / kind.tickets).log()
        self.policy, self.ref = LogitTable(log_p), LogitTable(log_q).requires_grad_(False)
        self.everything, self.distinct = _everything(kind, counts), _distinct(kind)
        self.kept: dict[object, Tensor] = {}  # cache: aim -> true gradient

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw the tickets of pi_old, log pi_ref, rewards and log pi, each [states, actions]."""
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
        """Draw as many episodes from pi_old as :attr:`everything` has."""
        count = len(self.everything.mask)
        return self.everything.rows(torch.randint(count, (count,), generator=self._generator))

    def numbers(self, episodes: Rollouts, coef: float, placement: str = "loss") -> Numbers:
        """Compute the tensors that a loss may take; ``coef`` is in reward per nat.

        Placement ``loss`` charges no reward. ``reward`` charges each reward with k1, ``split`` with
        the exact divergence. The advantages of ``split`` contain only that of later steps.
        """
        rewards, gains = self._charged(episodes, coef, placement)
        _, of_all = self._charged(self.everything, coef, placement)
        means = mean_by_state(of_all, self.everything, self.kind.states)
        pi, ref, old = (table[episodes.states] for table in self.tables().values())
        advantages = gains - means[episodes.states]
        return Numbers(**vars(episodes), problem=self, logits=pi, ref_logits=ref, old_logits=old,
                       rewards=rewards, advantages=advantages)  # fmt: skip

    @cached_property
    def batch(self) -> Numbers:
        """The tensors of :attr:`everything`, without a KL in the rewards."""
        return self.numbers(self.everything, 0.0)

    def expected_return(self) -> Tensor:
        """E[return] of pi_theta, a sum over distinct episodes."""
        chance = self.log_episodes(self.tables()["pi"]).exp()
        return (chance * self.raw_rewards(self.distinct).sum(1)).sum()

    def surrogate(self) -> Tensor:
        """TRPO's surrogate: E[A_old(s, a)] with states s sampled by pi_old, actions a by pi."""
        numbers = self.batch
        ratio = (numbers.log_probs - numbers.old_log_probs).exp()
        return (ratio * numbers.advantages).masked_fill(~numbers.mask, 0.0).sum(1).mean()

    def log_episodes(self, table: Tensor) -> Tensor:
        """Log of the probability of each distinct episode under a table of log-probs."""
        every = self.distinct
        steps = table[every.states, every.actions].masked_fill(~every.mask, 0.0)
        return steps.sum(1) - math.log(self.kind.starts)

    def along(self, values: Tensor) -> Tensor:
        """Sum ``values`` [states] over the steps of each distinct episode."""
        return values[self.distinct.states].masked_fill(~self.distinct.mask, 0.0).sum(1)

    def raw_rewards(self, episodes: Rollouts) -> Tensor:
        """Return the rewards before any charge, 0 outside the mask."""
        rewards = self._rewards[episodes.states, episodes.actions]
        if not self.kind.ends:
            return rewards.masked_fill(~episodes.mask, 0.0)
        last = episodes.mask.sum(1, keepdim=True) - 1
        return on_last(rewards.gather(1, last).squeeze(1), episodes.mask)

    def tables(self) -> dict[str, Tensor]:
        """Log-probs [states, actions] of pi (differentiable), ref and old."""
        log_p, log_q = (each.weight.log_softmax(-1) for each in (self.policy, self.ref))
        # If not stale, old is pi itself, so that ratios are exactly 1.
        return {"pi": log_p, "ref": log_q, "old": self._old if self.stale else log_p.detach()}

    def _charged(self, episodes: Rollouts, coef: float, placement: str) -> tuple[Tensor, Tensor]:
        """Return rewards and rewards to go, both after the charge of the placement."""
        raw, mask, tables = self.raw_rewards(episodes), episodes.mask, self.tables()
        log_p, log_q = tables["old"], tables["ref"]
        if placement == "split":
            kl = over_actions(self.divergence, log_p, log_q)[episodes.states]
        else:
            kl = (log_p - log_q)[episodes.states, episodes.actions]
        charged = raw if placement == "loss" else raw - coef * kl.masked_fill(~mask, 0.0)
        return charged, to_go(raw, mask) - coef * to_go(kl, mask, placement)


def _compositions(kind: Kind, generator: torch.Generator) -> Tensor:
    """Split each state's tickets among actions at random, at least 1 each, [states, actions]."""
    rows = [torch.randperm(kind.tickets - 1, generator=generator) for _ in range(kind.states)]
    cuts = (torch.stack(rows)[:, : kind.actions - 1] + 1).sort(1).values
    low = torch.zeros(kind.states, 1, dtype=torch.long)
    return cuts.diff(dim=1, prepend=low, append=low + kind.tickets)


def _everything(kind: Kind, tickets: Tensor) -> Rollouts:
    """Combine each start with each sequence of tickets, equally often; at least EPISODES rows."""
    actions = torch.arange(kind.actions)
    action_of = torch.stack([actions.repeat_interleave(row) for row in tickets])
    outcomes = [torch.arange(kind.starts), *[torch.arange(kind.tickets)] * kind.steps]
    draws = torch.cartesian_prod(*outcomes)
    draws = draws.repeat(math.ceil(EPISODES / len(draws)), 1)
    start, state, alive = draws[:, 0], draws[:, 0], torch.ones(len(draws), dtype=torch.bool)
    states, taken, mask = [], [], []
    for step in range(kind.steps):
        action = action_of[state, draws[:, 1 + step]].where(alive, 0)
        states.append(state)
        taken.append(action)
        mask.append(alive)
        if kind.ends:
            alive = alive & (action != 0)
        elif kind.halves and 2 * (step + 1) >= kind.steps:
            alive = alive & (start != kind.starts - 1)
        state = kind.starts + step * kind.actions + action
    return Rollouts(*(torch.stack(x, 1) for x in (states, taken, mask)))


@cache
def _distinct(kind: Kind) -> Rollouts:
    equal = torch.ones(kind.states, kind.actions, dtype=torch.long)
    every = _everything(replace(kind, tickets=kind.actions), equal)
    rows = torch.cat([every.states, every.actions, every.mask], 1).unique(dim=0)
    states, actions, mask = rows.chunk(3, 1)
    return Rollouts(states, actions, mask.bool())


def mean_by_state(values: Tensor, episodes: Rollouts, states: int) -> Tensor:
    """Average values [N, steps] over the visits of each state; 1 for states without visits."""
    at, values = episodes.states[episodes.mask], values[episodes.mask]
    ones = torch.ones(states, dtype=DOUBLE)
    return ones.scatter_reduce(0, at, values, "mean", include_self=False)
