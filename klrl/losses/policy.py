"""The losses of KLPEN, TRPO and clipped PPO, computed from the outputs of policy and critic.

Control and language use the same losses. A call of a loss changes no state and no coefficient; the
rules of :mod:`klrl.losses.beta` change beta.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from klrl.config import (
    ClipConfig,
    CustomLossConfig,
    DPPOConfig,
    KLPENConfig,
    LossConfig,
    TRPOConfig,
    factory,
)
from klrl.config.own import PartError, try_part
from klrl.kl.charge import ReferenceKL, penalized
from klrl.kl.divergences import REVERSE, Divergence
from klrl.kl.estimators import Estimator, masked_mean
from klrl.losses import terms
from klrl.losses.beta import BetaRule, make_beta_rule
from klrl.losses.sampler import BINARY, sampler_weight, trusted
from klrl.runs.metrics import METRICS


@dataclass(frozen=True)
class Scored:
    """The outputs of policy and critic for a minibatch, one number per position.

    Positions are frames [B] in control, response tokens [B, R] in language; all tensors have that
    shape. Log-probs, KLs and entropies are in nats.
    """

    log_prob: Tensor  # log pi_theta of the sampled action
    old_log_prob: Tensor  # log pi_old of the sampled action; pi_old is the policy before the update
    advantage: Tensor  # before normalisation, unless the caller normalised it
    kl_old: Tensor  # KL(old||new); ``PolicyLoss.kl_old`` says how it is computed
    entropy: Tensor  # entropy of pi_theta or an estimate; gradient only for a bonus
    value: Tensor | None = None  # V_theta; None without a critic
    value_target: Tensor | None = None  # the rollout's return estimate; None without a critic
    old_value: Tensor | None = None  # V during the rollout; None without a critic
    ref_log_prob: Tensor | None = None  # log pi_ref, for the estimators k1, k2 and k3
    exact_ref: Tensor | None = None  # the charged divergence, for the estimator exact
    sampler_log_prob: Tensor | None = None  # log mu, if mu, which sampled, is not pi_old
    sampler_divergence: Tensor | None = None  # of pi_theta from mu, exact; no gradient
    mask: Tensor | None = None  # bool, True at real positions; padding may contain anything

    @property
    def log_mu(self) -> Tensor:
        """The log-prob of the sampled action under mu, the policy that sampled it."""
        return self.old_log_prob if self.sampler_log_prob is None else self.sampler_log_prob

    def without_padding(self) -> Scored:
        """Return a copy with 0 at padding, so that padding reaches neither a sum nor a gradient."""
        if self.mask is None:
            return self
        held = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "mask"}
        real = {k: v.masked_fill(~self.mask, 0.0) for k, v in held.items() if v is not None}
        return replace(self, **real)


def example(*, tokens: bool) -> Scored:
    """Make a minibatch of frames [8], or of tokens [2, 4] with padding; pi_theta is near pi_old.

    ``log_prob``, ``kl_old`` and ``entropy`` require a gradient.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4) if tokens else (8,)

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return shift + scale * torch.randn(shape, generator=generator)

    old = normal(0.5, -1.5)
    values = {f.name: normal(1.0) for f in fields(Scored) if f.name != "mask"}
    values |= {"old_log_prob": old, "ref_log_prob": old + normal(0.1)}
    values |= {"sampler_log_prob": old + normal(0.1), "sampler_divergence": normal(0.1).abs()}
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
    """The loss of one minibatch, and its metrics."""

    total: Tensor
    measured: dict[str, Tensor]  # metric -> its value per position, unweighted


class PolicyLoss(ABC):
    """Base class of the losses; subclasses define the policy's gain on a minibatch.

    Args:
        config: the settings of the loss.
        reference_estimator: estimator of the KL(policy||reference) that the loss charges: exact,
            k1, k2, k3 or a function of the log-ratio; None if the loss charges no KL.
        divergence: the divergence that the estimator exact computes; k1, k2 and k3 estimate the
            reverse KL.
        reward_scale: the factor on the learner's rewards. The loss multiplies KL(policy||reference)
            by the same factor and, with ``normalize_advantage``, divides this KL by the standard
            deviation of the advantages. So ``kl.coef`` is always reward per nat.
    """

    #: How KL(old||new) is computed: exact; sampled (a differentiable estimate); or measured, for a
    #: loss that does not charge it (no gradient; exact in control, sampled in language).
    kl_old: str = "measured"
    target_kl: float | None = None  # nats per unit; an update stops early above 1.5 target_kl
    unit: str | None = None  # sequence: target_kl and dtarg are sums over a response
    line_search: str = "none"  # the mode of :func:`klrl.losses.line_search.due`
    max_alpha: float = 1.0  # the largest alpha of a line search
    dtarg: float = math.inf  # target of KL(old||new), nats per unit
    dtarg_end: float | None = None  # dtarg at the end of the run; linear in between
    dtarg_per: str = "state"  # action: dtarg is multiplied by the number of action dimensions
    anchor = "old"  # the policy in the ratio's denominator: old, or sampler (mu)
    natural = False  # True: natural_step updates the policy, gradient steps only the critic
    unsaved = False  # whether the loss has state; no checkpoint saves it

    def __init__(
        self,
        config: LossConfig,
        reference_estimator: Estimator | None = None,
        divergence: Divergence = REVERSE,
        reward_scale: float = 1.0,
    ) -> None:
        self.config, self.reference_estimator = config, reference_estimator
        self.divergence, self.reward_scale = divergence, reward_scale
        self._reduce = terms.REDUCTIONS[config.reduction]
        self._charged = frozenset(name for name, each in METRICS.items() if each.charged)

    @cached_property
    def measures(self) -> tuple[str, ...]:
        """The names of the metrics, in the order of ``LossTerms.measured``."""
        scored = example(tokens=self.config.reduction not in ("mean", "sum"))
        zero = torch.zeros(())
        return tuple(self(scored, zero, zero).measured)

    @property
    def entropy_bonus(self) -> float:
        """Coefficient of the entropy in the gain, per nat; 0 for no bonus."""
        return self.config.entropy_coeff if self.config.entropy_bonus else 0.0

    @property
    def target_moves(self) -> bool:
        """Whether the target of KL(old||new), in nats per position, may differ from ``dtarg``."""
        by_length = self.unit == "sequence" and math.isfinite(self.dtarg)
        return by_length or self.dtarg_end is not None or self.dtarg_per == "action"

    def target_at(self, progress: float) -> float:
        """Return the target of KL(old||new) at ``progress``, the share 0..1 of the run."""
        if self.dtarg_end is None:
            return self.dtarg
        return self.dtarg + (self.dtarg_end - self.dtarg) * min(progress, 1.0)

    def __call__(
        self, scored: Scored, beta: Tensor, kl_coef: Tensor, spread: Tensor | None = None
    ) -> LossTerms:
        """Compute the loss of a minibatch.

        Args:
            scored: outputs of policy and critic for the minibatch.
            beta: coefficient of KL(old||new), a scalar.
            kl_coef: coefficient of KL(policy||reference), a scalar; read if the loss charges it.
            spread: if the caller has normalised the advantages (``scored`` is then a part of a
                minibatch), the standard deviation by which it divided them; else None.
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
        # Add the terms before a single reduction, since each operation costs time in eager mode.
        gained = torch.add(gain, distance, alpha=-c.critic_coeff)
        if self.entropy_bonus:
            gained = torch.add(gained, s.entropy, alpha=self.entropy_bonus)
        measured = {"loss/objective": gain, "loss/critic": distance, "loss/entropy": s.entropy}
        if kl_ref is not None:
            gained = penalized(gained, kl_ref, kl_coef)
            measured["loss/kl_ref"] = kl_ref
        measured |= {"kl/old/exact": s.kl_old, "policy/entropy": s.entropy}
        if (masked := self.masked(s, advantage)) is not None:
            measured["loss/masked"] = masked
        return LossTerms(-self._reduce(gained, s.mask), measured)

    def share(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return the factor for the loss of ``rows`` (bool [B]), a part of a minibatch.

        The mean over a part and the mean over the minibatch have different divisors. Multiplied by
        these factors, the losses of the parts add up to the loss of the minibatch.
        """
        ones = mask.double()
        own = self._reduce(ones[rows], mask[rows])  # 0 if no position of these rows is real
        return self._reduce(ones * rows[:, None], mask) / own.where(own > 0, 1.0)

    def measure(self, measured: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Reduce each metric of a minibatch to a number, in the order of :attr:`measures`.

        Metrics with ``charged`` in ``METRICS`` are reduced like the loss; the others are averaged.
        """
        if mask is None and self._reduce is masked_mean:
            return torch.stack(tuple(measured.values())).flatten(1).mean(1)  # in one operation
        ways = {True: self._reduce, False: masked_mean}
        return torch.stack([ways[n in self._charged](x, mask) for n, x in measured.items()])

    def weighted(self, means: Mapping[str, float], kl_coef: float) -> dict[str, float]:
        """Multiply means over minibatches by their factors, if any, in the minimised loss."""
        weights = {
            "loss/objective": -1.0,
            "loss/critic": self.config.critic_coeff,
            "loss/entropy": -self.entropy_bonus,
            "loss/kl_ref": kl_coef,
        }
        # Add 0.0, since the entropy's term would be -0.0 without an entropy bonus.
        return {name: weights.get(name, 1.0) * mean + 0.0 for name, mean in means.items()}

    def _distance(self, scored: Scored) -> Tensor:
        if scored.value is None:
            return torch.zeros_like(scored.advantage)
        assert scored.value_target is not None
        assert scored.old_value is not None
        kind, clip = self.config.loss_critic_type, self.config.clip_value
        return terms.critic_loss(scored.value, scored.value_target, scored.old_value, kind, clip)

    def _kl_ref(self, scored: Scored) -> Tensor | None:
        """Return the KL(policy||reference) that the loss charges; None if it charges none."""
        if self.reference_estimator is None:
            return None
        if self.reference_estimator == "exact":
            if scored.exact_ref is None:
                raise ValueError("estimator=exact: the exact KL is missing")
            return scored.exact_ref
        assert scored.ref_log_prob is not None
        # Off policy the weight is pi_theta / mu, whatever the anchor: the tokens are mu's.
        log_probs = scored.log_prob, scored.log_mu, scored.ref_log_prob
        return terms.reference_kl(self.reference_estimator, *log_probs)

    def weighted_gain(self, gain: Tensor, scored: Scored) -> Tensor:
        """Multiply a gain by ``loss.sampler_weight``, if any."""
        weight = self.sampler_weight(scored)
        return gain if weight is None else weight * gain

    def sampler_weight(self, scored: Scored) -> Tensor | None:
        """Return the weight of each position, pi_old against mu; None for no weight."""
        c = self.config
        if c.sampler_weight is None:
            return None
        limits = c.sampler_cap, c.sampler_low, c.sampler_high
        log_probs = scored.old_log_prob, scored.log_mu
        return sampler_weight(c.sampler_weight, *log_probs, scored.mask, limits)

    def masked(self, scored: Scored, advantage: Tensor) -> Tensor | None:
        """Return 1 at positions without a gradient, else 0; None for a loss that masks none."""
        weight = self.sampler_weight(scored)
        if weight is None or self.config.sampler_weight == "truncate":
            return None
        return (weight == 0).to(weight)

    def beta_rule(self) -> BetaRule:
        """Make the rule that adapts beta; here a constant 0, which charges no KL(old||new)."""
        return BetaRule()

    @abstractmethod
    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """Compute the policy's gain at each position; ``scored`` has zeros at padding."""


class KLPENLoss(PolicyLoss):
    """Gain w A - beta KL(old||new), w = pi_theta / pi_old (Schulman et al. 2017, eq. 8)."""

    config: KLPENConfig

    def __init__(self, config: KLPENConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.kl_old, self.unit = config.kl_old, config.unit
        self.line_search, self.max_alpha = config.line_search, config.max_alpha
        self.dtarg, self.dtarg_end = config.dtarg, config.dtarg_end
        self.dtarg_per = config.dtarg_per

    def beta_rule(self) -> BetaRule:
        """Make the rule that ``loss.beta_rule`` names."""
        return make_beta_rule(self.config)

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """Compute the penalised surrogate w A - beta KL(old||new)."""
        gain = terms.surrogate(scored.log_prob, scored.old_log_prob, advantage)
        gain = self.weighted_gain(gain, scored)
        return torch.addcmul(gain, scored.kl_old, beta, value=-1)


class TRPOLoss(PolicyLoss):
    """Gain w A, w = pi_theta / pi_old, for a natural-gradient step (Schulman et al. 2015)."""

    natural, line_search, max_alpha = True, "always", 4.0

    def __init__(self, config: TRPOConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.dtarg, self.dtarg_end = config.dtarg, config.dtarg_end
        self.dtarg_per = config.dtarg_per

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """Compute the surrogate w A, times any ``loss.sampler_weight``."""
        gain = terms.surrogate(scored.log_prob, scored.old_log_prob, advantage)
        return self.weighted_gain(gain, scored)


class ClipLoss(PolicyLoss):
    """Gain min(w A, clip(w) A), w = pi_theta / pi_old (Schulman et al. 2017, eq. 7)."""

    config: ClipConfig

    def __init__(self, config: ClipConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.target_kl, self.unit = config.target_kl, config.unit

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """Compute the clipped surrogate, times any ``loss.sampler_weight``."""
        c, anchor = self.config, scored.log_mu if self.anchor == "sampler" else scored.old_log_prob
        limits = c.clip_epsilon, c.clip_epsilon_high
        gain = terms.clipped_surrogate(scored.log_prob, anchor, advantage, *limits)
        return self.weighted_gain(gain, scored)


class DPPOLoss(PolicyLoss):
    """Gain M q A - log2_coef (log q)^2, q = pi_theta / mu; :func:`trusted` computes M."""

    config: DPPOConfig
    anchor = "sampler"

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """Compute the surrogate of the trusted tokens, and the penalty on log q."""
        gain = terms.surrogate(scored.log_prob, scored.log_mu, advantage)
        gain = gain * self._trusted(scored, advantage)
        if not self.config.log2_coef:
            return gain
        log_q = scored.log_prob - scored.log_mu
        return torch.addcmul(gain, log_q, log_q, value=-self.config.log2_coef)

    def masked(self, scored: Scored, advantage: Tensor) -> Tensor:
        """Return 1 at the tokens that M leaves out."""
        return (~self._trusted(scored, advantage)).to(advantage)

    def _trusted(self, scored: Scored, advantage: Tensor) -> Tensor:
        log_probs = scored.log_prob.detach(), scored.log_mu
        binary = BINARY.get(self.config.measure)
        divergence = scored.sampler_divergence if binary is None else binary(*log_probs)
        if divergence is None:
            raise ValueError(f"measure={self.config.measure}: the exact divergence is missing")
        return trusted(*log_probs, advantage, divergence > self.config.delta)


class LikelihoodLoss(PolicyLoss):
    """Gain log pi(a|s) of the data's actions: maximum likelihood."""

    def gain(self, scored: Scored, advantage: Tensor, beta: Tensor) -> Tensor:
        """Return the log-likelihood, nats per position."""
        return scored.log_prob


def make_loss(
    config: LossConfig, domain: str, kl: ReferenceKL | None, reward_scale: float = 1.0
) -> PolicyLoss:
    """Make the loss of a run; it charges what ``kl`` leaves to the loss."""
    loss: PolicyLoss = factory("loss", config, domain)(
        config,
        reference_estimator=None if kl is None else kl.loss_estimator,
        divergence=REVERSE if kl is None else kl.divergence,
        reward_scale=reward_scale,
    )
    return loss


# ------------------------------------------------------------------------------- loss=custom

#: Fields of Scored through which a gradient reaches the policy.
_MOVES = ("log_prob", "kl_old", "entropy")


def custom(config: CustomLossConfig, **given: object) -> PolicyLoss:
    """``loss=custom``: make the user's :class:`PolicyLoss`, and try it once."""
    use = partial(_try, tokens=config.reduction not in ("mean", "sum"))
    given["config"] = config
    # Checkpoints do not save a loss's state_dict.
    made, unsaved = try_part("loss", config, given, PolicyLoss, use, saved=False)  # type: ignore[type-abstract]
    made.unsaved = unsaved
    return made


def _try(loss: PolicyLoss, *, tokens: bool) -> None:
    """Call a custom loss's gain on synthetic data: frames [8], or tokens [2, 4] with padding."""
    if not hasattr(loss, "config"):
        raise PartError("its __init__ does not call PolicyLoss's; add super().__init__(**given)")
    scored = example(tokens=tokens)
    real = scored.without_padding()
    gain = loss.gain(real, real.advantage, scored.log_prob.new_tensor(loss.beta_rule().beta))
    shape = tuple(scored.log_prob.shape)
    if not isinstance(gain, Tensor) or tuple(gain.shape) != shape:
        gave = f"shape {tuple(gain.shape)}" if isinstance(gain, Tensor) else type(gain).__name__
        raise PartError(f"gain returned {gave} for positions of shape {shape}; give one for each")
    if not torch.isfinite(gain).all():
        raise PartError("gain is not finite at finite log-probs; look for log 0 and 0 / 0")
    moving = [getattr(scored, name) for name in _MOVES]
    grads = torch.autograd.grad(gain.sum(), moving, allow_unused=True) if gain.requires_grad else ()
    if not any(grad is not None for grad in grads):
        raise PartError("gain has no gradient in the policy; look for detach() and no_grad()")
    if not all(torch.isfinite(grad).all() for grad in grads if grad is not None):
        raise PartError("gain has a gradient that is not finite; look for log 0 and 0 / 0")
