"""Refuses KL penalties whose placement would give them a wrong gradient (docs/kl.md)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from klrl.base.errors import ConfigError

#: Where the penalty is charged: in the reward, in the loss, or (split) in both. With split, the
#: loss has each step's own KL, and the reward charges an action for the KL of later steps.
PLACEMENTS = ("reward", "loss", "split")
#: Selects the user's own function (``kl.own_estimator``, ``kl.own_divergence``). A custom estimator
#: is checked like k2: it is sampled, and its gradient in the reward is wrong.
OWN = "custom"
#: Divergences of policy and reference; :mod:`klrl.kl.divergences` has the formulas.
DIVERGENCES = ("reverse", "forward", "js")
#: The largest number of joint actions over which klrl sums js, tv or a custom divergence.
MOST_JOINT = 4096


class Gradient(Enum):
    """The expected gradient of a penalty, if the current policy sampled the actions."""

    EXACT = "the gradient of the whole penalty"
    OWN_STEP = "the gradient of each step's own KL; the part through later states is missing"
    WRONG = "a gradient that is not the penalty's"
    TWICE = "each step's own KL counted twice"


#: Sampled estimator -> its gradient in the reward; :mod:`klrl.kl.estimators` has the formulas.
SAMPLED = {"k1": Gradient.EXACT, "k2": Gradient.WRONG, "k3": Gradient.WRONG}
ESTIMATORS = (*SAMPLED, "exact")
#: placement -> estimator -> gradient
VERDICTS: Mapping[str, Mapping[str, Gradient]] = {
    "reward": {**SAMPLED, "exact": Gradient.WRONG},
    "loss": dict.fromkeys(ESTIMATORS, Gradient.OWN_STEP),
    "split": {**dict.fromkeys(SAMPLED, Gradient.TWICE), "exact": Gradient.EXACT},
}


def check_placement(placement: str, estimator: str, allow_biased: bool = False) -> None:
    """Refuse a pair of placement and estimator with a wrong gradient.

    ``allow_biased`` accepts a wrong gradient, but not one that counts steps twice.

    Raises:
        ConfigError: the pair is refused.
    """
    gradient = VERDICTS[placement]["k2" if estimator == OWN else estimator]
    if gradient is Gradient.WRONG and not allow_biased:
        raise ConfigError(
            f"kl.estimator={estimator}: in the reward only k1 has the gradient of the KL "
            "(docs/kl.md); use kl.estimator=k1, kl.placement=loss, or kl.placement=split "
            "kl.estimator=exact, or set kl.allow_biased=true"
        )
    if gradient is Gradient.TWICE:
        raise ConfigError(
            f"kl.placement=split: needs the exact KL; {estimator} would count a step twice; "
            "add kl.estimator=exact"
        )


def check_divergence(divergence: str, placement: str, estimator: str) -> None:
    """Refuse a divergence other than the reverse KL, in the reward or with a sampled estimator.

    Let u = pi_ref / pi at the sampled action, and D = E_pi[f(u)]. To give the gradient of D, a
    reward would have to be f(u) - u f'(u) for the step's own action, and f(u) for the actions
    before it. The two rewards differ by a constant only for the reverse KL, f = -log u. The
    sampled estimators k1, k2 and k3 estimate the reverse KL alone.

    Raises:
        ConfigError: the divergence is refused.
    """
    if divergence == "reverse":
        return
    if placement == "reward":
        raise ConfigError(
            f"kl.divergence={divergence}: no reward has the gradient of this divergence "
            "(docs/kl.md); add kl.placement=split kl.estimator=exact"
        )
    if estimator != "exact":
        raise ConfigError(
            f"kl.divergence={divergence}: kl.estimator={estimator} samples the reverse KL; "
            "add kl.estimator=exact"
        )
