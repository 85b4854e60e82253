"""KLPEN and clipped PPO: from what a policy says about a minibatch to one number to minimise.

Nothing here knows a domain, holds state or moves a coefficient: a forward without gradient, in
evaluation or anywhere else, changes nothing. beta is moved by :mod:`klrl.losses.beta`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from klrl.config import ClipConfig, CustomLossConfig, KLPENConfig, LossConfig
from klrl.config.own import Unfit, make_tried
from klrl.kl.charge import penalized
from klrl.kl.divergences import REVERSE, Divergence
from klrl.kl.estimators import Estimator
from klrl.losses.beta import BetaRule, make_beta_rule
from klrl.objectives import functional as terms
from klrl.runs.metrics import METRICS


@dataclass(frozen=True)
class Scored:
    """What policy and critic say of a minibatch, one number per position.

    Positions are frames [B] of a control run, response tokens [B, R] of a language run; all tensors
    have that shape. Log-probs, KLs and entropies are in nats.
    """

    log_prob: Tensor  # log pi_theta of what was done there
    old_log_prob: Tensor  # log pi_old of the same, the policy that sampled
    advantage: Tensor  # as it was estimated; the loss normalises it where it is told to
    kl_old: Tensor  # KL(old||new), as PolicyLoss.kl_old says
    entropy: Tensor  # of pi_theta; without a bonus only measured, and outside the graph
    value: Tensor | None = None  # V_theta; None without a critic
    value_target: Tensor | None = None  # the rollout's return estimate, beside a value
    old_value: Tensor | None = None  # V during the rollout, beside a value
    ref_log_prob: Tensor | None = None  # log pi_ref, for the estimators k1, k2 and k3
    exact_ref: Tensor | None = None  # the divergence that is charged, differentiable, for exact
    mask: Tensor | None = None  # bool, where positions are real; the others may hold anything

    def without_padding(self) -> Scored:
        """Zeros at padding: what stands there must reach neither a sum nor a gradient."""
        if self.mask is None:
            return self
        held = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "mask"}
        real = {k: v.masked_fill(~self.mask, 0.0) for k, v in held.items() if v is not None}
        return replace(self, **real)


def example(*, tokens: bool) -> Scored:
    """A made-up minibatch, frames [8] or tokens [2, 4] with padding, of a policy near its old one.

    What moves the policy requires a gradient: ``log_prob``, ``kl_old`` and ``entropy``.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4) if tokens else (8,)

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return shift + scale * torch.randn(shape, generator=generator)

    old = normal(0.5, -1.5)
    values = {f.name: normal(1.0) for f in fields(Scored) if f.name != "mask"}
    values |= {"old_log_prob": old, "ref_log_prob": old + normal(0.1)}
    values |= {
        "log_prob": (old + normal(0.1)).requires_grad_(),
        "kl_old": normal(0.01).abs().requires_grad_(),
        "entropy": normal(0.1, 1.5).requires_grad_(),
        "exact_ref": normal(0.01).abs(),
    }
    mask = torch.tensor([[True] * 4, [True, True, False, False]]) if tokens else None
    return Scored(**values, mask=mask)


@dataclass(frozen=True)
class LossTerms:
    """What one minibatch gives."""

    total: Tensor
    measured: dict[str, Tensor]  # metric -> its value per position, unweighted


class PolicyLoss(ABC):
    """What both losses share; subclasses say how much a policy gains on a minibatch.

    Args:
        config: the loss group.
        reference_estimator: how the loss charges KL(policy||reference): exact, k1, k2 or k3; None
            where it does not.
        divergence: what ``exact`` is of policy and reference; the estimators are the reverse KL's.
        reward_scale: what rewards were multiplied by before advantages were estimated. The KL in
            the loss is multiplied by it too, and divided by the spread that ``normalize_advantage``
            divides by: ``kl.coef`` is reward per nat wherever the KL is charged.
    """

    #: Those of the next that are settings of its group; a subclass adds to its base's.
    of_settings: tuple[str, ...] = ()
    #: KL(old||new) of a minibatch: exact; sampled, an estimate with its gradient; or measured,
    #: outside the graph, since nothing is charged for it.
    kl_old: str = "measured"
    target_kl: float | None = None  # nats per unit; 1.5 times it ends an update's epochs
    unit: str | None = None  # of target_kl and dtarg: sequence, a response's sum; else a position
    line_search: str = "none"  # which steps are scaled to dtarg: back (too long ones) or both
    max_alpha: float = 1.0  # how many times as long a step may become
    dtarg: float = math.inf  # of KL(old||new), nats per unit
    dtarg_end: float | None = None  # at the end of the run, linearly from dtarg
    forgets = False  # has state, which no checkpoint holds

    def __init__(
        self,
        config: LossConfig,
        reference_estimator: Estimator | None = None,
        divergence: Divergence = REVERSE,
        reward_scale: float = 1.0,
    ) -> None:
        self.config, self.reference_estimator = config, reference_estimator
        named = (vars(each).get("of_settings", ()) for each in type(self).__mro__)
        for name in {name for names in named for name in names}:
            setattr(self, name, getattr(config, name))
        self.divergence, self.reward_scale = divergence, reward_scale
        self._reduce = terms.REDUCTIONS[config.reduction]
        self._charged = frozenset(name for name, each in METRICS.items() if each.charged)

    @cached_property
    def measures(self) -> tuple[str, ...]:
        """The metrics of :class:`LossTerms`, in its order, read off a call."""
        scored = example(tokens=self.config.reduction not in ("mean", "sum"))
        zero = torch.zeros(())
        return tuple(self(scored, zero, zero).measured)

    @property
    def entropy_bonus(self) -> float:
        """What a nat of entropy adds to the gain; 0 for no bonus."""
        return self.config.entropy_coeff if self.config.entropy_bonus else 0.0

    @property
    def target_moves(self) -> bool:
        """Whether the target per position is another one in every iteration."""
        by_length = self.unit == "sequence" and math.isfinite(self.dtarg)
        return by_length or self.dtarg_end is not None

    def target_at(self, progress: float) -> float:
        """``dtarg`` where a share 0..1 of the run is over."""
        if self.dtarg_end is None:
            return self.dtarg
        return self.dtarg + (self.dtarg_end - self.dtarg) * min(progress, 1.0)

    def __call__(
        self, scored: Scored, beta: Tensor, kl_coef: Tensor, spread: Tensor | None = None
    ) -> LossTerms:
        """Evaluate on a minibatch.

        Args:
            scored: what policy and critic say of it.
            beta: of KL(old||new), a scalar; only KLPEN reads it.
            kl_coef: of KL(policy||reference), a scalar, where the loss charges it.
            spread: what the advantage was divided by over the minibatch that this is a part of,
                where it is normalised already; None: it is normalised here.
        """
        c, s = self.config, scored.without_padding()
        advantage, kl_ref = s.advantage, self._kl_ref(s)
        if kl_ref is not None and self.reward_scale != 1.0:
            kl_ref = kl_ref * self.reward_scale
        if c.normalize_advantage:
            if spread is None:
                advantage, spread = terms.normalized(advantage, s.mask)
            kl_ref = None if kl_ref is None else kl_ref / spread
        gain = self.gain(s, advantage, beta)
        distance = self._distance(s)
        # One reduction of the sum over terms: eager mode pays for each operation, not its numbers.
        gained = torch.add(gain, distance, alpha=-c.critic_coeff)
        if self.entropy_bonus:
            gained = torch.add(gained, s.entropy, alpha=self.entropy_bonus)
        measured = {"loss/objective": gain, "loss/critic": distance, "loss/entropy": s.entropy}
        if kl_ref is not None:
            gained = penalized(gained, kl_ref, kl_coef)
            measured["loss/kl_ref"] = kl_ref
        measured |= {"kl/old/exact": s.kl_old, "policy/entropy": s.entropy}
        return LossTerms(-self._reduce(gained, s.mask), measured)

    def share(self, rows: Tensor, mask: Tensor) -> Tensor:
        """What the loss of some rows [B] counts in the loss of their minibatch, which is the sum.

        A mean over them has their number below it, and the minibatch's mean has its own; any
        reduction that adds up numbers with weights is told from what it makes of ones.
        """
        ones = mask.double()
        own = self._reduce(ones[rows], mask[rows])  # 0 where no position of these rows is real
        return self._reduce(ones * rows[:, None], mask) / own.where(own > 0, 1.0)

    def weights(self, kl_coef: float) -> dict[str, float]:
        """Factors of charged metrics in what is minimised, where they are not 1."""
        return {
            "loss/objective": -1.0,
            "loss/critic": self.config.critic_coeff,
            "loss/entropy": -self.entropy_bonus,
            "loss/kl_ref": kl_coef,
        }

    def measure(self, measured: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """One number for each of :attr:`measures`, of a minibatch.

        What a metric's declaration says is charged is reduced as the loss is, the rest to a mean.
        """
        if mask is None and self._reduce is terms.mean:
            return torch.stack(tuple(measured.values())).flatten(1).mean(1)  # in one operation
        ways = {True: self._reduce, False: terms.mean}
        return torch.stack([ways[n in self._charged](x, mask) for n, x in measured.items()])

    def weighted(self, means: Mapping[str, float], kl_coef: float) -> dict[str, float]:
        """Means over minibatches, the terms of the loss as they were minimised."""
        weights = self.weights(kl_coef)
        # + 0.0: no -0.0 without a bonus
        return {name: weights.get(name, 1.0) * mean + 0.0 for name, mean in means.items()}

    def _distance(self, scored: Scored) -> Tensor:
        """Of the values to their targets; 0 without a critic."""
        if scored.value is None:
            return torch.zeros_like(scored.advantage)
        assert scored.value_target is not None
        assert scored.old_value is not None
        kind, clip = self.config.loss_critic_type, self.config.clip_value
        return terms.critic_loss(scored.value, scored.value_target, scored.old_value, kind, clip)

    def _kl_ref(self, scored: Scored) -> Tensor | None:
        """KL(policy||reference) as the loss charges it; None where it does not."""
        if self.reference_estimator is None:
            return None
        if self.reference_estimator == "exact":
            if scored.exact_ref is None:
                raise ValueError("estimator=exact: the exact KL is missing")
            return scored.exact_ref
        assert scored.ref_log_prob is not None
        log_probs = scored.log_prob, scored.old_log_prob, scored.ref_log_prob
        return terms.reference_kl(self.reference_estimator, *log_probs)

    def beta_rule(self) -> BetaRule:
        """What moves beta, new; by default a fixed 0: no KL(old||new) is charged."""
        return BetaRule()

    @abstractmethod
    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """What the policy gains at each position; ``scored`` has zeros at padding."""


class KLPENLoss(PolicyLoss):
    """w A - beta KL(old||new) (Schulman et al. 2017, eq. 8)."""

    config: KLPENConfig

    of_settings = ("kl_old", "line_search", "max_alpha", "dtarg", "dtarg_end", "unit")

    def beta_rule(self) -> BetaRule:
        """The rule of ``loss.beta_rule``."""
        return make_beta_rule(self.config)

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """W A - beta KL(old||new)."""
        gain = terms.surrogate(scored.log_prob, scored.old_log_prob, advantage)
        return torch.addcmul(gain, scored.kl_old, beta, value=-1)


class ClipLoss(PolicyLoss):
    """min(w A, clip(w) A) (Schulman et al. 2017, eq. 7)."""

    config: ClipConfig

    of_settings = ("target_kl", "unit")

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """The clipped surrogate."""
        log_probs, c = (scored.log_prob, scored.old_log_prob), self.config
        return terms.clipped_surrogate(*log_probs, advantage, c.clip_epsilon, c.clip_epsilon_high)


# ------------------------------------------------------------------------------- loss=custom

#: What klrl differentiates a loss by.
_MOVES = ("log_prob", "kl_old", "entropy")


def custom(
    config: CustomLossConfig,
    reference_estimator: Estimator | None = None,
    divergence: Divergence = REVERSE,
    reward_scale: float = 1.0,
) -> PolicyLoss:
    """The user's :class:`PolicyLoss`."""
    given = {
        "config": config,
        "reference_estimator": reference_estimator,
        "divergence": divergence,
        "reward_scale": reward_scale,
    }

    tokens = config.reduction not in ("mean", "sum")
    use = partial(_try, tokens=tokens)
    # No checkpoint has a loss's state_dict.
    made, forgets = make_tried("loss", config, given, PolicyLoss, use, saved=False)
    loss: PolicyLoss = made
    loss.forgets = forgets
    return loss


def _try(loss: PolicyLoss, *, tokens: bool) -> None:
    """Call it on a few made-up positions: frames [8], or tokens [2, 4] with padding."""
    if not hasattr(loss, "config"):
        raise Unfit("its __init__ does not call PolicyLoss's; add super().__init__(**given)")
    scored = example(tokens=tokens)
    real = scored.without_padding()
    gain = loss.gain(real, real.advantage, scored.log_prob.new_tensor(loss.beta_rule().beta))
    shape = tuple(scored.log_prob.shape)
    if not isinstance(gain, Tensor) or tuple(gain.shape) != shape:
        gave = f"shape {tuple(gain.shape)}" if isinstance(gain, Tensor) else type(gain).__name__
        raise Unfit(f"gain returned {gave} for positions of shape {shape}; give one each")
    if not torch.isfinite(gain).all():
        raise Unfit("gain is not finite at finite log-probs; look for log 0 and 0 / 0")
    moving = [getattr(scored, name) for name in _MOVES]
    grads = torch.autograd.grad(gain.sum(), moving, allow_unused=True) if gain.requires_grad else ()
    if not any(grad is not None for grad in grads):
        raise Unfit("gain has no gradient in the policy; look for detach() and no_grad()")
    if not all(torch.isfinite(grad).all() for grad in grads if grad is not None):
        raise Unfit("gain has a gradient that is not finite; look for log 0 and 0 / 0")
