"""KLPEN and clipped PPO: from what the networks say about a minibatch to one number to minimise.

Nothing here holds state or moves a coefficient: a forward without gradient, in evaluation or
anywhere else, changes nothing. beta is moved by :mod:`klrl.losses.beta`, once per iteration.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from klrl.config import CONTROL, ClipConfig, KLPENConfig, LossConfig, factory
from klrl.kl.charge import penalized
from klrl.kl.family import Family
from klrl.losses import functional as terms
from klrl.losses.beta import BetaRule, make_beta_rule

Minibatch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LossTerms:
    """What one minibatch gives.

    Attributes:
        total: what is minimised, a scalar.
        frames: what it consists of, per frame [B] and unweighted, in the order of
            :attr:`PolicyLoss.measures`.
    """

    total: Tensor
    frames: tuple[Tensor, ...]


@dataclass(frozen=True)
class Coefficients:
    """What moves between iterations, as scalar tensors.

    Attributes:
        beta: of KL(old||new); only KLPEN reads it.
        kl_ref: of KL(policy||reference), where the loss charges it.
    """

    beta: Tensor
    kl_ref: Tensor


class PolicyLoss(ABC):
    """What both losses share; subclasses say how much a policy gains on a minibatch.

    Args:
        config: the loss group.
        family: the action distribution.
        reference_estimator: how the loss charges KL(policy||reference): exact, k1, k2 or k3; None
            where it does not.
        target_kl: KL(old||new), nats per frame, whose 1.5-fold ends an update's epochs; None for no
            such end.
        line_search: which updates are scaled to bring KL(old||new) to ``dtarg``: none, back (too
            long ones) or both.
        dtarg: that target, nats per frame; infinite where there is none.
    """

    def __init__(
        self,
        config: LossConfig,
        family: Family,
        reference_estimator: str | None = None,
        *,
        target_kl: float | None,
        line_search: str,
        dtarg: float,
    ) -> None:
        self.config, self.family = config, family
        self.reference_estimator = reference_estimator
        self.target_kl, self.line_search, self.dtarg = target_kl, line_search, dtarg
        self._reduce = _mean if config.reduction == "mean" else _sum

    def __call__(
        self,
        params: Mapping[str, Tensor],
        value: Tensor,
        batch: Minibatch,
        coefficients: Coefficients,
    ) -> LossTerms:
        """Evaluate on a minibatch.

        Args:
            params: the new policy's parameters at the minibatch's observations.
            value: the new critic's values [B].
            batch: ``action_log_prob, advantage, value_target, state_value`` [B], the family's
                sample, the old policy's parameters, where the loss charges KL to the reference
                ``ref_log_prob`` [B] and ``ref_<parameter>``, and what :meth:`draw` gives.
            coefficients: beta and the reference's.
        """
        c = self.config
        log_prob = self.family.log_prob(params, batch[self.family.sample_key])
        advantage = batch["advantage"]
        if c.normalize_advantage:
            advantage = terms.normalized(advantage)
        kl_old = self.kl_old(params, batch)
        gain = self.gain(log_prob, advantage, kl_old, batch, coefficients.beta)
        distance = terms.critic_loss(
            value, batch["value_target"], batch["state_value"], c.loss_critic_type, c.clip_value
        )
        entropy = self._entropy(params, batch.get("entropy_noise"))
        # One reduction of the sum over terms: eager mode pays for each operation, not its numbers.
        gained = torch.add(gain, distance, alpha=-c.critic_coeff)
        if entropy.requires_grad:
            gained = torch.add(gained, entropy, alpha=c.entropy_coeff)
        kl_ref = self._kl_ref(log_prob, params, batch)
        if kl_ref is not None:
            gained = penalized(gained, kl_ref, coefficients.kl_ref)
        frames = gain, distance, entropy, kl_old
        return LossTerms(-self._reduce(gained), frames if kl_ref is None else (*frames, kl_ref))

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what :class:`LossTerms` holds per frame: nats, but for gain and distance."""
        charged = () if self.reference_estimator is None else ("kl_ref",)
        return ("gain", "distance", "entropy", "kl_old", *charged)

    def weighted(self, means: Mapping[str, float], count: int, kl_ref: float) -> dict[str, float]:
        """The terms as they were minimised, from means over frames.

        Args:
            means: of :attr:`measures`.
            count: frames in a minibatch, B.
            kl_ref: the coefficient of KL(policy||reference).

        Returns:
            ``objective`` (minus the gain), ``critic``, ``entropy`` (minus the weighted bonus) and
            ``kl_ref``, reduced as the loss reduces; ``policy_entropy``, the mean in nats.
        """
        c, size = self.config, 1 if self.config.reduction == "mean" else count
        bonus = c.entropy_coeff if c.entropy_bonus else 0.0
        return {
            "objective": -size * means["gain"],
            "critic": size * c.critic_coeff * means["distance"],
            "entropy": -size * bonus * means["entropy"],
            "kl_ref": size * kl_ref * means.get("kl_ref", 0.0),
            "policy_entropy": means["entropy"],
        }

    def _kl_ref(
        self, log_prob: Tensor, params: Mapping[str, Tensor], batch: Minibatch
    ) -> Tensor | None:
        """KL(policy||reference) per frame [B]; None where the loss does not charge it."""
        if self.reference_estimator is None:
            return None
        if self.reference_estimator == "exact":
            ref = {key: batch[f"ref_{key}"] for key in self.family.param_keys}
            return self.family.kl(params, ref)
        old, ref_log_prob = batch["action_log_prob"], batch["ref_log_prob"]
        return terms.reference_kl(self.reference_estimator, log_prob, old, ref_log_prob)

    def _entropy(self, params: Mapping[str, Tensor], noise: Tensor | None) -> Tensor:
        """Entropy [B], nats; outside the graph where there is no bonus."""
        if not self.config.entropy_bonus or self.config.entropy_coeff == 0:
            params = {key: value.detach() for key, value in params.items()}
        return self.family.entropy(params, noise)

    def draw(self, batch: Minibatch) -> dict[str, Tensor]:
        """The random numbers of one evaluation, which is a pure function of them.

        Args:
            batch: [B, ...], with the old policy's parameters.

        Returns:
            ``entropy_noise`` [B, samples, A] where the entropy has no closed form.
        """
        old = {key: batch[key] for key in self.family.param_keys}
        noise = self.family.entropy_noise(old, self.config.samples_mc_entropy)
        return {} if noise is None else {"entropy_noise": noise}

    def kl_old(self, params: Mapping[str, Tensor], batch: Minibatch) -> Tensor:
        """KL(old||new) per frame [B], in closed form."""
        return self.family.kl({k: batch[k] for k in self.family.param_keys}, params)

    @abstractmethod
    def beta_rule(self) -> BetaRule:
        """What moves beta, new."""

    @abstractmethod
    def gain(
        self, log_prob: Tensor, advantage: Tensor, kl_old: Tensor, batch: Minibatch, beta: Tensor
    ) -> Tensor:
        """What the policy gains per frame [B]."""


class KLPENLoss(PolicyLoss):
    """w A - beta KL(old||new) (Schulman et al. 2017, eq. 8)."""

    config: KLPENConfig

    def __init__(
        self, config: KLPENConfig, family: Family, reference_estimator: str | None = None
    ) -> None:
        super().__init__(
            config,
            family,
            reference_estimator,
            target_kl=None,
            line_search=config.line_search,
            dtarg=config.dtarg,
        )

    def beta_rule(self) -> BetaRule:
        """The rule of ``loss.beta_rule``."""
        return make_beta_rule(self.config)

    def gain(
        self, log_prob: Tensor, advantage: Tensor, kl_old: Tensor, batch: Minibatch, beta: Tensor
    ) -> Tensor:
        """W A - beta KL(old||new), [B]."""
        gain = terms.surrogate(log_prob, batch["action_log_prob"], advantage)
        return torch.addcmul(gain, kl_old, beta, value=-1)

    def kl_old(self, params: Mapping[str, Tensor], batch: Minibatch) -> Tensor:
        """In closed form, or (to compare) the mean of log old - log new over samples of old."""
        if self.config.kl_old == "exact":
            return super().kl_old(params, batch)
        sample = batch["old_sample"]
        old = {key: batch[key].unsqueeze(1) for key in self.family.param_keys}
        new = {key: params[key].unsqueeze(1) for key in self.family.param_keys}
        return (self.family.log_prob(old, sample) - self.family.log_prob(new, sample)).mean(1)

    def draw(self, batch: Minibatch) -> dict[str, Tensor]:
        """Also ``old_sample`` [B, samples_mc_kl, ...], where KL(old||new) is sampled."""
        drawn = super().draw(batch)
        if self.config.kl_old == "sampled":
            old = {key: batch[key] for key in self.family.param_keys}
            sample = self.family.sample(old, self.config.samples_mc_kl)
            drawn["old_sample"] = sample.movedim(0, 1)
        return drawn


class ClipLoss(PolicyLoss):
    """min(w A, clip(w) A) (Schulman et al. 2017, eq. 7)."""

    config: ClipConfig

    def __init__(
        self, config: ClipConfig, family: Family, reference_estimator: str | None = None
    ) -> None:
        super().__init__(
            config,
            family,
            reference_estimator,
            target_kl=config.target_kl,
            line_search="none",
            dtarg=math.inf,
        )

    def beta_rule(self) -> BetaRule:
        """A fixed 0: no KL(old||new) is charged."""
        return BetaRule()

    def gain(
        self, log_prob: Tensor, advantage: Tensor, kl_old: Tensor, batch: Minibatch, beta: Tensor
    ) -> Tensor:
        """The clipped surrogate [B]; KL(old||new) is measured, not charged."""
        old = batch["action_log_prob"]
        return terms.clipped_surrogate(log_prob, old, advantage, self.config.clip_epsilon)

    def kl_old(self, params: Mapping[str, Tensor], batch: Minibatch) -> Tensor:
        """Measured only: outside the graph."""
        return super().kl_old({key: value.detach() for key, value in params.items()}, batch)


def _mean(value: Tensor) -> Tensor:
    return value.mean()


def _sum(value: Tensor) -> Tensor:
    return value.sum()


def make_loss(
    config: LossConfig, family: Family, reference_estimator: str | None = None
) -> PolicyLoss:
    """The loss of the group's choice; arguments as :class:`PolicyLoss`."""
    return factory("loss", config, CONTROL)(config, family, reference_estimator)
