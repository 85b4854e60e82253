"""One update: epochs of minibatches over a rollout, then beta's update and the line search.

This algorithm is the same for control and language. Their gradient steps differ: see the subclasses
of :class:`Steps` in :mod:`klrl.control.run.update` and :mod:`klrl.language.run.update`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base.errors import NonFiniteError
from klrl.config import JobConfig, KLPENConfig, OptimConfig
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss
from klrl.runs.metrics import Row, require_declared

Frames = TypeVar("Frames")
Minibatch = TypeVar("Minibatch")


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of a gradient step."""

    lr: float
    beta: float  # coefficient of KL(old||new)
    kl_ref: float  # ``kl.coef``: coefficient of KL(policy||reference), if the loss charges that KL


class Steps(ABC, Generic[Frames, Minibatch]):
    """The gradient steps of control or of language, on policy and critic."""

    loss: PolicyLoss
    optimizer: Any  # with state_dict and load_state_dict
    sampled_old = False  # whether :meth:`kl_old` estimates the KL by k3
    mode: str  # how steps are compiled, as learner.compile; may change at the first minibatch
    #: Called at the first minibatch: ``say`` with each line for the user; ``made`` with entries of
    #: the manifest: ``compile``, the new ``mode``, and ``library``, the kernel's.
    say: Callable[[str], None]
    made: Callable[..., None]

    @property
    @abstractmethod
    def actor_parameters(self) -> list[nn.Parameter]:
        """The policy's parameters; a line search scales their update."""

    @abstractmethod
    def lay_out(self, batch: TensorDictBase) -> Frames:
        """Prepare a rollout for the update, before its first step."""

    @abstractmethod
    def minibatches(self, frames: Frames) -> Iterable[Minibatch]:
        """Shuffle a rollout, and split it into ``learner.minibatches`` parts."""

    @abstractmethod
    def step(self, minibatch: Minibatch, coefficients: Coefficients) -> Tensor:
        """Take a gradient step; return its metrics [M]; the last one is the gradient's norm."""

    def epoch(self, frames: Frames, coefficients: Coefficients) -> Tensor:
        """Take a gradient step on each minibatch of a rollout; return their metrics [steps, M]."""
        return torch.stack([self.step(each, coefficients) for each in self.minibatches(frames)])

    @abstractmethod
    def kl_old(self, frames: Frames) -> float:
        """Compute the mean KL(old||new) over a rollout in closed form, nats per frame or token."""

    def exact_old(self, frames: Frames) -> Row:
        """Return any closed form of a KL(old||new) that :meth:`kl_old` estimates."""
        return {}

    def positions_per_unit(self, frames: Frames) -> float:
        """Return n such that dtarg / n and target_kl / n are in nats per frame or token."""
        return 1.0

    def natural_step(self, frames: Frames, kl_coef: float, target: float) -> None:
        """Take a natural-gradient step to KL(old||new) = ``target``, nats per frame."""
        raise NotImplementedError("natural_step: only control implements it")


class KLAdaptiveRate:
    """``optim.rate=kl_adaptive``: a learning rate that keeps KL(old||new) near a target.

    KL > 2 target -> lr /= 1.5; 0 < KL < target / 2 -> lr *= 1.5; bounded. The KL, in nats per frame
    or token, is measured on a minibatch before its gradient step, from the second step on; after an
    update of a single step, on the rollout.
    The next step uses the new rate; in rsl_rl's PPO the same step uses it.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config, self.lr = config, config.lr

    def update(self, kl: float) -> float:
        """Update the learning rate by a minibatch's KL; return the rate of the next step."""
        c = self.config
        if kl > 2 * c.kl_target:
            self.lr = max(self.lr / 1.5, c.lr_min)
        elif 0 < kl < c.kl_target / 2:
            self.lr = min(self.lr * 1.5, c.lr_max)
        return self.lr

    def state_dict(self) -> dict[str, float]:
        """Return the rate, for a checkpoint."""
        return {"lr": self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's rate."""
        self.lr = float(state["lr"])


class Learner:
    """PPO's update: trains policy and critic on a rollout, then changes beta by KL(old||new)."""

    def __init__(self, config: JobConfig, steps: Steps[Any, Any]) -> None:
        self.config, self.steps, self.loss = config, steps, steps.loss
        self.beta_rule: BetaRule = steps.loss.beta_rule()
        adaptive = config.optim.rate == "kl_adaptive"
        self.rate = KLAdaptiveRate(config.optim) if adaptive else None
        self._names = (*steps.loss.measures, "learner/grad_norm")
        require_declared(self._names)

    def update(self, batch: TensorDictBase, progress: float, kl_coef: float = 0.0) -> Row:
        """Learn from a rollout with advantages; return the metrics.

        ``progress`` is the share of the run that is done, 0..1. The loss's metrics and the
        gradient's norm are means over minibatches. ``kl/old/exact`` is KL(old||new) of the whole
        rollout after the update; ``kl/old/beta`` is beta before the update.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        optim, beta = self.config.optim, self.beta_rule.beta
        lr = optim.lr + (optim.lr_floor - optim.lr) * min(progress, 1.0)
        frames = self.steps.lay_out(batch)
        # KL(old||new) is measured per frame or token, so convert its targets to that unit.
        positions = self.steps.positions_per_unit(frames)
        self.beta_rule.dtarg = dtarg = self.loss.target_at(progress) / positions
        # Only a line search reads this copy of the actor's weights.
        searched = self.loss.line_search != "none"
        actor_before = [p.detach().clone() for p in self.steps.actor_parameters if searched]
        alpha, kl_old = 1.0, 0.0
        if self.loss.natural:
            self.steps.natural_step(frames, kl_coef, dtarg)
            # Search first, so that the critic's steps measure the policy that is kept.
            alpha, kl_old = self._search(frames, actor_before, self.steps.kl_old(frames), dtarg)
        metrics: list[Tensor] = []
        epochs = 0
        while epochs < self.config.learner.epochs:
            epochs += 1
            lr = self.rate.lr if self.rate else lr
            self._epoch(frames, lr, kl_coef, metrics)
            target = self.loss.target_kl
            if target and self.steps.kl_old(frames) > 1.5 * target / positions:
                break
        table = torch.cat(metrics).double().cpu()  # [steps, M]
        cause = "loss.dtarg" if self.loss.natural else "optim.lr"
        require_finite(table, self._names, self.config.learner.minibatches, cause)
        means = dict(zip(self._names, table.mean(0).tolist(), strict=True))
        if not self.loss.natural:
            kl_old = self.steps.kl_old(frames)
        if not self.beta_rule.every_forward:
            self.beta_rule.update(kl_old)  # by the KL before a line search
        if self.rate and len(metrics) == 1:
            self.rate.update(kl_old)  # no later minibatch measures the only step
        if searched and not self.loss.natural:
            alpha, kl_old = self._search(frames, actor_before, kl_old, dtarg)
        learned = self.loss.weighted(means, kl_coef)
        lr = self.rate.lr if self.rate else lr
        learned |= {"kl/old/exact": kl_old, "learner/lr": lr, "learner/epochs": epochs}
        if isinstance(self.config.loss, KLPENConfig):
            learned["kl/old/beta"] = beta
        if isinstance(self.config.loss, KLPENConfig) or searched:
            learned["learner/alpha"] = alpha
        if self.steps.sampled_old:
            learned["kl/old/k3"] = learned.pop("kl/old/exact")
            learned |= self.steps.exact_old(frames)
        return learned | ({"kl/old/target": dtarg} if self.loss.target_moves else {})

    def _search(
        self, frames: Any, before: Sequence[Tensor], kl: float, target: float
    ) -> tuple[float, float]:
        """Run the line search from ``before`` if due; return alpha and KL(old||new)."""
        from klrl.losses import line_search

        if not line_search.due(self.loss.line_search, kl, target):
            return 1.0, kl
        measure = partial(self.steps.kl_old, frames)
        now, most = self.steps.actor_parameters, self.loss.max_alpha
        return line_search.search(now, before, measure, kl, target, most)

    def _epoch(self, frames: Any, lr: float, kl_coef: float, metrics: list[Tensor]) -> None:
        """Make one pass over the rollout; append its steps' metrics [steps, M]."""
        coefficients = Coefficients(lr, self.beta_rule.beta, kl_coef)
        # Only two rules read a metric within an epoch, since reading it waits for the device.
        if not (self.beta_rule.every_forward or self.rate):
            metrics.append(self.steps.epoch(frames, coefficients))
            return
        for minibatch in self.steps.minibatches(frames):
            metrics.append(self.steps.step(minibatch, coefficients).unsqueeze(0))
            kl = float(metrics[-1][0, self._names.index("kl/old/exact")])
            if self.beta_rule.every_forward:
                self.beta_rule.update(kl)
            if self.rate and len(metrics) > 1:  # before the first step, the KL is rounding
                lr = self.rate.update(kl)
            coefficients = Coefficients(lr, self.beta_rule.beta, kl_coef)


def require_finite(
    metrics: Tensor, names: tuple[str, ...], minibatches: int, lower: str = "optim.lr"
) -> None:
    """Raise a NonFiniteError that names the first metric and minibatch with NaN or infinity."""
    bad = (~torch.isfinite(metrics)).nonzero()
    if len(bad):
        step, term = bad[0].tolist()
        raise NonFiniteError(
            f"{names[term]} is {float(metrics[step, term])} in minibatch "
            f"{step % minibatches} of epoch {step // minibatches + 1}; "
            f"lower {lower} or check the rewards"
        )
