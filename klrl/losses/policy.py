"""KLPEN and clipped PPO: from what the networks say about a minibatch to one number to minimise.

Nothing here holds state or moves a coefficient: a forward without gradient, in evaluation or
anywhere else, changes nothing. beta is moved by :mod:`klrl.losses.beta`, once per iteration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from klrl.config import ClipConfig, KLPENConfig, LossConfig
from klrl.losses import functional as terms
from klrl.models.distributions import Family

Minibatch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LossTerms:
    """What one minibatch gives.

    Attributes:
        total: what is minimised, a scalar: the sum of the four terms below.
        objective: minus the policy's gain, with the KL(old||new) penalty for KLPEN.
        critic: critic_coeff * distance.
        entropy: -entropy_coeff * entropy.
        kl_ref: coef * KL(policy||reference), where the loss charges it, else 0.
        policy_entropy: mean entropy, nats.
        kl_old: mean KL(old||new) of the minibatch, nats.
    """

    total: Tensor
    objective: Tensor
    critic: Tensor
    entropy: Tensor
    kl_ref: Tensor
    policy_entropy: Tensor
    kl_old: Tensor


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
    """

    def __init__(
        self, config: LossConfig, family: Family, reference_estimator: str | None = None
    ) -> None:
        self.config, self.family = config, family
        self.reference_estimator = reference_estimator
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
        objective = -self._reduce(gain)
        distance = terms.critic_loss(
            value, batch["value_target"], batch["state_value"], c.loss_critic_type, c.clip_value
        )
        critic = c.critic_coeff * self._reduce(distance)
        entropy_loss, mean_entropy = self._entropy(params, batch.get("entropy_noise"))
        kl_ref = self._kl_ref(log_prob, params, batch, coefficients.kl_ref)
        return LossTerms(
            total=objective + critic + entropy_loss + kl_ref,
            objective=objective.detach(),
            critic=critic.detach(),
            entropy=entropy_loss.detach(),
            kl_ref=kl_ref.detach(),
            policy_entropy=mean_entropy,
            kl_old=kl_old.detach().mean(),
        )

    def _kl_ref(
        self, log_prob: Tensor, params: Mapping[str, Tensor], batch: Minibatch, coef: Tensor
    ) -> Tensor:
        """coef * KL(policy||reference), reduced; 0 where the loss does not charge it."""
        if self.reference_estimator is None:
            return log_prob.new_zeros(())
        if self.reference_estimator == "exact":
            ref = {key: batch[f"ref_{key}"] for key in self.family.param_keys}
            kl = self.family.kl(params, ref)
        else:
            kl = terms.reference_kl(
                self.reference_estimator,
                log_prob,
                batch["action_log_prob"],
                batch["ref_log_prob"],
            )
        return coef * self._reduce(kl)

    def _entropy(self, params: Mapping[str, Tensor], noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """(-entropy_coeff * entropy, reduced; mean entropy in nats)."""
        c = self.config
        if not c.entropy_bonus or c.entropy_coeff == 0:
            params = {key: value.detach() for key, value in params.items()}
            entropy = self.family.entropy(params, noise)
            return entropy.new_zeros(()), entropy.mean()
        entropy = self.family.entropy(params, noise)
        return -c.entropy_coeff * self._reduce(entropy), entropy.detach().mean()

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
    def gain(
        self, log_prob: Tensor, advantage: Tensor, kl_old: Tensor, batch: Minibatch, beta: Tensor
    ) -> Tensor:
        """What the policy gains per frame [B]."""


class KLPENLoss(PolicyLoss):
    """w A - beta KL(old||new) (Schulman et al. 2017, eq. 8)."""

    config: KLPENConfig

    def gain(
        self, log_prob: Tensor, advantage: Tensor, kl_old: Tensor, batch: Minibatch, beta: Tensor
    ) -> Tensor:
        """W A - beta KL(old||new), [B]."""
        return terms.surrogate(log_prob, batch["action_log_prob"], advantage) - beta * kl_old

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
    kind = KLPENLoss if isinstance(config, KLPENConfig) else ClipLoss
    return kind(config, family, reference_estimator)
