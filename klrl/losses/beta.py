"""Rules that adapt beta, KLPEN's coefficient of KL(old||new), to keep this KL near dtarg.

A rule reads d, the mean KL(old||new) over the rollout after the update, in nats per frame or token;
:class:`ForwardBeta` instead reads the KL of each minibatch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from klrl.config import KLPENConfig
from klrl.config.own import try_part
from klrl.kl.controllers import moves


def doubling(kl: float, dtarg: float, increment: float, decrement: float) -> float:
    """Return the factor for beta: increment if KL > 1.5 dtarg, decrement if KL < dtarg / 1.5."""
    if kl > 1.5 * dtarg:
        return increment
    if kl < dtarg / 1.5:
        return decrement
    return 1.0


def multiplied(
    beta: float, kl: float, factor: Callable[[float], float], beta_min: float, beta_max: float
) -> float:
    """Return beta * factor(KL), within bounds; if the KL is not finite, beta, with a warning."""
    if not math.isfinite(kl):
        warnings.warn(f"KL(old||new)={kl}: beta stays at {beta}", stacklevel=3)
        return beta
    return min(max(beta * factor(kl), beta_min), beta_max)


class BetaRule:
    """A fixed beta; base class of the rules. A loss without a KL(old||new) penalty has beta 0."""

    every_forward = False  # True: update by the KL of each minibatch, not of the rollout
    unsaved = False  # whether the rule has state that ``state_dict`` lacks

    def __init__(self, beta: float = 0.0, dtarg: float = math.inf) -> None:
        self.beta, self.dtarg = beta, dtarg

    def update(self, kl: float) -> float:
        """Update beta by d, nats per frame or token; return the new beta."""
        return self.beta

    def state_dict(self) -> dict[str, float]:
        """Return beta, for a checkpoint."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's beta."""
        self.beta = float(state["beta"])


class DoublingBeta(BetaRule):
    """d < dtarg / 1.5 -> beta *= decrement; d > 1.5 dtarg -> beta *= increment; bounded.

    The rule of Schulman et al. (2017), sec. 4, with factors ``loss.increment`` and
    ``loss.decrement``. A KL that is not finite leaves beta unchanged, with a warning.
    """

    def __init__(self, config: KLPENConfig) -> None:
        super().__init__(config.beta, config.dtarg)
        self.config = config

    def update(self, kl: float) -> float:
        """Update beta by the rollout's KL, within beta_min .. beta_max."""
        c = self.config
        self.beta = multiplied(self.beta, kl, self.factor, c.beta_min, c.beta_max)
        return self.beta

    def factor(self, kl: float) -> float:
        """Return the factor by which to multiply beta."""
        return doubling(kl, self.dtarg, self.config.increment, self.config.decrement)


class ProportionalBeta(DoublingBeta):
    """beta *= exp(clip(g ln(d / dtarg), -ln 4, ln 4)) with g = ``loss.gain``; bounded."""

    def factor(self, kl: float) -> float:
        """Return the factor (d / dtarg)^g, clipped to 1/4 .. 4."""
        log_factor = self.config.gain * math.log(max(kl, 1e-12) / self.dtarg)
        return math.exp(min(max(log_factor, -math.log(4)), math.log(4)))


class ForwardBeta(DoublingBeta):
    """TorchRL's rule, for comparison: DoublingBeta's factors after every minibatch, unbounded.

    TorchRL 0.14's ``KLPENPPOLoss.forward`` changes beta by each minibatch's KL, also in evaluation.
    Without bounds, beta can go to 0 or infinity. In klrl only the learner changes beta.
    """

    every_forward = True

    def update(self, kl: float) -> float:
        """Update beta by a minibatch's KL."""
        self.beta *= self.factor(kl)
        return self.beta


def own_beta_rule(config: KLPENConfig) -> BetaRule:
    """``loss.beta_rule=custom``: make the user's :class:`BetaRule` and try it once."""
    given = {"config": config, "beta": config.beta, "dtarg": config.dtarg}
    use = moves("beta", [2 * config.dtarg])
    part = config.own_beta_rule
    assert part is not None  # a rule requires it
    made, unsaved = try_part("loss.own_beta_rule", part, given, BetaRule, use)
    made.unsaved = unsaved
    return made


BETA_RULES: dict[str, Callable[[KLPENConfig], BetaRule]] = {
    "doubling": DoublingBeta,
    "proportional": ProportionalBeta,
    "forward": ForwardBeta,
    "custom": own_beta_rule,
}


def make_beta_rule(config: KLPENConfig) -> BetaRule:
    """Make the rule that ``loss.beta_rule`` names."""
    return BETA_RULES[config.beta_rule](config)
