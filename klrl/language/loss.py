"""What tells the policy losses of a language run apart, per token."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from klrl.config import ClipConfig, KLPENConfig
from klrl.language import token_loss as terms
from klrl.losses.beta import BetaRule, make_beta_rule


class TokenLoss(Protocol):
    """How much a policy gains on a minibatch, and what ends or scales its update.

    Attributes:
        target_kl: KL(old||new), nats per token, whose 1.5-fold ends an update's epochs; None for no
            such end.
        line_search: which updates are scaled to bring KL(old||new) to ``dtarg``: none, back, both.
        dtarg: that target, nats per token; infinite where there is none.
        exact_kl_old: whether the KL(old||new) of a minibatch is over the whole vocabulary; else k3
            of its tokens.
    """

    target_kl: float | None
    line_search: str
    dtarg: float
    exact_kl_old: bool

    def beta_rule(self) -> BetaRule:
        """What moves beta, new."""

    def gain(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        kl_old: Tensor,
        mask: Tensor,
        beta: float,
    ) -> Tensor:
        """What the policy gains per token, [B, R]; arguments of the same shape."""


class KLPENLoss:
    """w A - beta KL(old||new); see :class:`TokenLoss`."""

    target_kl = None

    def __init__(self, config: KLPENConfig) -> None:
        self.config = config
        self.line_search, self.dtarg = config.line_search, config.dtarg
        self.exact_kl_old = config.kl_old == "exact"

    def beta_rule(self) -> BetaRule:
        """The rule of ``loss.beta_rule``."""
        return make_beta_rule(self.config)

    def gain(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        kl_old: Tensor,
        mask: Tensor,
        beta: float,
    ) -> Tensor:
        """W A - beta KL(old||new), [B, R]."""
        return terms.klpen_gain(log_prob, old_log_prob, advantage, kl_old, mask, beta)


class ClipLoss:
    """min(w A, clip(w) A); see :class:`TokenLoss`."""

    line_search, dtarg = "none", math.inf
    #: It is measured only, and k3 costs nothing.
    exact_kl_old = False

    def __init__(self, config: ClipConfig) -> None:
        self.config = config
        self.target_kl = config.target_kl

    def beta_rule(self) -> BetaRule:
        """A fixed 0: no KL(old||new) is charged."""
        return BetaRule()

    def gain(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        kl_old: Tensor,
        mask: Tensor,
        beta: float,
    ) -> Tensor:
        """The clipped surrogate, [B, R]."""
        epsilon = self.config.clip_epsilon
        return terms.clip_gain(log_prob, old_log_prob, advantage, mask, epsilon)
