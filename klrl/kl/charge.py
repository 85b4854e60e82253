"""Charge KL(policy||reference), times a coefficient, to the reward or the loss.

KLs are in nats, coefficients in reward per nat. :data:`klrl.config.placement.VERDICTS` declares
which estimators each placement allows. If a run charges one of the other divergences of
:mod:`klrl.kl.divergences`, "KL" below means that divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from klrl.config import OwnPart, RetrieveKLConfig
from klrl.config.own import PartError, config_errors, import_target
from klrl.config.placement import OWN, PLACEMENTS
from klrl.kl.coefficient import coefficient
from klrl.kl.divergences import REVERSE, Divergence, Which
from klrl.kl.estimators import Estimator, as_mask, estimate_kl

#: Key under "next" of every batch: the KL in nats, not multiplied by the coefficient.
KL_KEY = "kl_penalty"
#: Key under "next" of a control batch: the reward before the KL is charged.
RAW_REWARD_KEY = "reward_raw"


class ReferenceKL(nn.Module):
    """The penalty of a run: coefficient, estimator and placement of KL(policy||reference).

    Args:
        coef: the initial coefficient, reward per nat; or a pair: the transform that has the
            coefficient in a buffer, and the buffer's name.
        estimator: k1, k2, k3, exact or a function of the log-ratio.
        placement: what the KL is charged to: reward, loss, or split between both (:func:`to_go`).
        transform: the transform that charges the KL to rewards, or None.
        online: whether the environment applies the transform at every step; else it is applied to
            whole batches.
        divergence: the divergence that is charged. All but the reverse KL require the estimator
            exact, and the placement loss or split.
    """

    def __init__(
        self,
        coef: float | tuple[nn.Module, str],
        estimator: Estimator,
        placement: str,
        transform: nn.Module | None = None,
        *,
        online: bool = False,
        divergence: Divergence = REVERSE,
    ) -> None:
        super().__init__()
        self.estimator, self.placement, self.divergence = estimator, placement, divergence
        self.transform, self.online = transform, online
        if not isinstance(coef, tuple):
            self.register_buffer("_coef", coefficient(coef))
            coef = (self, "_coef")
        self._kept = coef

    @property
    def coef(self) -> float:
        """The current coefficient, reward per nat; a controller may change it."""
        return float(self._coef_tensor)

    @coef.setter
    def coef(self, value: float) -> None:
        self._coef_tensor.copy_(coefficient(value))

    @property
    def _coef_tensor(self) -> Tensor:
        # Look the buffer up by name, since moving the module to a device replaces the tensor.
        module, name = self._kept
        return module.get_buffer(name)

    @property
    def charges_reward(self) -> bool:
        """Whether coef * KL is subtracted from the reward."""
        return self.placement != "loss"

    @property
    def loss_estimator(self) -> Estimator | None:
        """The estimator that the loss charges; None if the loss charges no KL."""
        return None if self.placement == "reward" else self.estimator

    def shaped(self, reward: Tensor, kl: Tensor) -> Tensor:
        """Return reward - coef * KL, or the unchanged reward if only the loss charges the KL."""
        return shaped(reward, kl, self.coef) if self.charges_reward else reward


def sampled_kl(
    estimator: Estimator,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    exact: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute KL(pi_old || pi_ref) at every step of a rollout, in nats; 0 outside the mask.

    All tensors have the same shape. The estimator exact requires ``exact``, the closed form.
    """
    if estimator != "exact":
        return estimate_kl(log_prob, ref_log_prob, estimator, mask)
    if exact is None:
        raise ValueError("estimator=exact: the exact KL is missing")
    return exact if mask is None else exact.masked_fill(~as_mask(mask, exact), 0.0)


def on_last(score: Tensor, mask: Tensor) -> Tensor:
    """Return rewards [B, R]: each response's score [B] at its last real token, 0 elsewhere."""
    last = mask.sum(1, keepdim=True) - 1
    return torch.zeros(mask.shape, dtype=score.dtype, device=score.device).scatter(
        1, last, score[:, None]
    )


def shaped(reward: Tensor, kl: Tensor, coef: float | Tensor) -> Tensor:
    """Return reward - coef * KL, or advantage - coef * KL to go; the shapes must match."""
    if reward.shape != kl.shape:
        raise ValueError(
            f"reward {tuple(reward.shape)} and KL {tuple(kl.shape)}: shapes must match"
        )
    kl = kl.masked_fill(kl.isinf() & (coef == 0), 0.0)  # 0 * inf would be NaN
    return reward - coef * kl


def penalized(gain: Tensor, kl: Tensor, coef: Tensor) -> Tensor:
    """Return gain - coef * KL, both [B], in one differentiable operation."""
    return torch.addcmul(gain, kl, coef, value=-1)


def to_go(kl: Tensor, mask: Tensor | None = None, placement: str = "reward") -> Tensor:
    """Compute the KL to go [B, T]: for each step, the sum of the KLs subtracted from its return.

    It is sum_{t' >= t} KL_t' for the placement ``reward``, and 0 for ``loss``. For ``split`` it is
    sum_{t' > t} KL_t', since the loss charges KL_t. Steps outside ``mask`` [B, T] add nothing to
    the sums, and their KL to go is 0.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement}: choose one of {', '.join(PLACEMENTS)}")
    if placement == "loss":
        return torch.zeros_like(kl)
    if mask is not None:
        mask = as_mask(mask, kl)
        kl = kl.masked_fill(~mask, 0.0)
    later = kl.flip(1).cumsum(1).flip(1)
    if placement == "split":
        later = later - kl
    return later if mask is None else later.masked_fill(~mask, 0.0)


def weighted_reward(charged: Tensor, raw: Tensor, weight: float) -> Tensor:
    """Return the learner's reward, ``weight`` * raw - penalty, from charged = raw - penalty."""
    return charged if weight == 1.0 else charged + (weight - 1) * raw


# ------------------------------------------------ kl.estimator=custom, kl.divergence=custom

# The user gives a function f of log pi - log pi_ref. A custom estimator is f at the sampled action.
# A custom divergence is E_pi[f]: a sum over all actions, or for a Gaussian a mean over draws.

#: Printed at the start of a run with a custom divergence.
BLIND = (
    "kl.divergence=custom: E_pi[f] ignores actions that the policy takes with probability 0 (a "
    "Gaussian: does not draw), even if the reference often takes them; E_pi[f] >= 0 is not checked"
)
#: Largest allowed |f(0)| of a custom function f, nats. At log-ratio 0 a divergence must be 0.
_ZERO = 1e-6


def chosen_estimator(config: RetrieveKLConfig) -> Estimator:
    """Return the estimator that ``kl.estimator`` names, or the user's function."""
    own = config.estimator == OWN
    return _checked("kl.own_estimator", config.own_estimator) if own else config.estimator


def chosen_divergence(config: RetrieveKLConfig) -> Which:
    """Return the divergence that ``kl.divergence`` names, or the user's function."""
    own = config.divergence == OWN
    return _checked("kl.own_divergence", config.own_divergence) if own else config.divergence


def _checked(setting: str, part: OwnPart | None) -> Callable[[Tensor], Tensor]:
    """Import and try the user's function."""
    assert part is not None  # a rule requires it
    function = partial(import_target(setting, part), **part.args)
    log_ratio = torch.linspace(-2, 2, 9).reshape(3, 3).requires_grad_()  # 0 at [1, 1]
    with config_errors(setting, part):
        value = function(log_ratio)
        if not isinstance(value, Tensor) or value.shape != log_ratio.shape:
            gave = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise PartError(f"returned {gave} for log-ratios of shape (3, 3); give one for each")
        if not value.isfinite().all():
            raise PartError("is not finite at log-ratios of -2 to 2")
        if not value.requires_grad:
            raise PartError("has no gradient in the log-ratio; remove detach or no_grad")
        if abs(zero := float(value[1, 1].detach())) > _ZERO:
            raise PartError(
                f"is {zero:.3g} where policy and reference agree (log-ratio 0); a divergence is 0 "
                "there"
            )
    return function
