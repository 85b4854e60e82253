"""One update: epochs of minibatches over a rollout, then beta and the line search.

The algorithm knows no domain: what a rollout, a minibatch and a gradient step are is in
:class:`Steps`, which :mod:`klrl.control.update` and :mod:`klrl.language.run.update` implement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base.errors import NonFiniteError
from klrl.config import JobConfig, KLPENConfig
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss
from klrl.runs.metrics import Row, require_declared

Frames = TypeVar("Frames")
Minibatch = TypeVar("Minibatch")


@dataclass(frozen=True)
class Coefficients:
    """What a gradient step is made with."""

    lr: float
    beta: float  # of KL(old||new)
    kl_ref: float  # ``kl.coef``, of KL(policy||reference), for a loss that charges it


class Steps(ABC, Generic[Frames, Minibatch]):
    """The gradient steps of a domain, on the networks that it holds."""

    loss: PolicyLoss
    optimizer: Any  # with state_dict and load_state_dict
    mode: str  # false (eager), jit or aot; until the first minibatch as the settings say
    #: Both are called at the first minibatch: with lines for the user, with another mode.
    say: Callable[[str], None]
    mode_changed: Callable[[str], None]

    @property
    @abstractmethod
    def actor_parameters(self) -> list[nn.Parameter]:
        """What KL(old||new) depends on, and a line search scales."""

    @abstractmethod
    def lay_out(self, batch: TensorDictBase) -> Frames:
        """A rollout as this update needs it, before its first step."""

    @abstractmethod
    def minibatches(self, frames: Frames) -> Iterable[Minibatch]:
        """One pass: everything once, shuffled, in ``learner.minibatches`` equal parts."""

    @abstractmethod
    def step(self, minibatch: Minibatch, coefficients: Coefficients) -> Tensor:
        """One gradient step; what the loss measured [M], then the gradient's norm."""

    @abstractmethod
    def kl_old(self, frames: Frames) -> float:
        """Mean KL(old||new) over a rollout in closed form, nats per frame or token."""

    def positions_per_unit(self, frames: Frames) -> float:
        """Frames or tokens whose KLs add up to one of ``loss.unit``: 1, or a response's tokens."""
        return 1.0


class Learner:
    """PPO's update: policy and critic from one rollout, then beta from its KL."""

    def __init__(self, config: JobConfig, steps: Steps[Any, Any]) -> None:
        self.config, self.steps, self.loss = config, steps, steps.loss
        self.beta_rule: BetaRule = steps.loss.beta_rule()
        self._names = (*steps.loss.measures, "learner/grad_norm")
        require_declared(self._names)

    def update(self, batch: TensorDictBase, progress: float, kl_coef: float = 0.0) -> Row:
        """Learn from a rollout with advantages.

        ``progress`` is the share of the run that is over, 0..1. What the loss measured and the
        gradient's norm are means over minibatches; KL(old||new) is that of the whole rollout after
        the update, ``kl/old/beta`` what the update started with.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        optim, beta = self.config.optim, self.beta_rule.beta
        lr = optim.lr + (optim.lr_floor - optim.lr) * min(progress, 1.0)
        frames = self.steps.lay_out(batch)
        # KL(old||new) is measured per position, and so are its targets here.
        positions = self.steps.positions_per_unit(frames)
        self.beta_rule.dtarg = dtarg = self.loss.target_at(progress) / positions
        # A copy of all weights, which only a line search reads.
        searched = self.loss.line_search != "none"
        actor_before = [p.detach().clone() for p in self.steps.actor_parameters if searched]
        metrics: list[Tensor] = []
        epochs = 0
        while epochs < self.config.learner.epochs:
            epochs += 1
            metrics += self._epoch(frames, lr, kl_coef)
            target = self.loss.target_kl
            if target and self.steps.kl_old(frames) > 1.5 * target / positions:
                break
        table = torch.stack(metrics).double().cpu()  # [steps, M]
        require_finite(table, self._names, self.config.learner.minibatches)
        means = dict(zip(self._names, table.mean(0).tolist(), strict=True))
        kl_old = self.steps.kl_old(frames)
        if not self.beta_rule.every_forward:
            self.beta_rule.update(kl_old)  # on the KL before a line search
        alpha = 1.0
        if searched:
            from klrl.losses import line_search

            if line_search.due(self.loss.line_search, kl_old, dtarg):
                now, measure = self.steps.actor_parameters, partial(self.steps.kl_old, frames)
                ends = (measure, kl_old, dtarg, self.loss.max_alpha)
                alpha, kl_old = line_search.search(now, actor_before, *ends)
        learned = self.loss.weighted(means, kl_coef)
        learned |= {"kl/old/exact": kl_old, "learner/lr": lr, "learner/epochs": epochs}
        if isinstance(self.config.loss, KLPENConfig):
            learned |= {"kl/old/beta": beta, "learner/alpha": alpha}
        return learned | ({"kl/old/target": dtarg} if self.loss.target_moves else {})

    def _epoch(self, frames: Any, lr: float, kl_coef: float) -> list[Tensor]:
        """One pass over the rollout; the metrics of each step."""
        metrics: list[Tensor] = []
        coefficients = Coefficients(lr, self.beta_rule.beta, kl_coef)
        for minibatch in self.steps.minibatches(frames):
            metrics.append(self.steps.step(minibatch, coefficients))
            # Only this rule reads a metric here: that waits for the device between two steps.
            if self.beta_rule.every_forward:
                beta = self.beta_rule.update(float(metrics[-1][self._names.index("kl/old/exact")]))
                coefficients = Coefficients(lr, beta, kl_coef)
        return metrics


def require_finite(metrics: Tensor, names: tuple[str, ...], minibatches: int) -> None:
    """Name the first term, of the first minibatch, that is not finite."""
    bad = (~torch.isfinite(metrics)).nonzero()
    if len(bad):
        step, term = bad[0].tolist()
        raise NonFiniteError(
            f"{names[term]} is {float(metrics[step, term])} in minibatch "
            f"{step % minibatches} of epoch {step // minibatches + 1}; "
            "lower optim.lr or look at the rewards"
        )
