"""Says which estimator and divergence are allowed in which placement: docs/kl.md's tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from klrl.base.errors import ConfigError

#: Where the penalty is charged: in the reward, in the loss, or (split) in the reward, with each
#: step's own KL also in the loss.
PLACEMENTS = ("reward", "loss", "split")
#: A custom function (``kl.own_estimator``, ``kl.own_divergence``). A custom estimator is checked
#: like k2: it is sampled, and in the reward its gradient is not that of a KL.
OWN = "custom"
#: Divergences of policy and reference. The formulas: :mod:`klrl.kl.divergences`.
DIVERGENCES = ("reverse", "forward", "js")


class Gradient(Enum):
    """The expected gradient of a penalty, on actions that the policy itself sampled."""

    EXACT = "the gradient of the whole penalty"
    OWN_STEP = "the gradient of each step's own KL; the part through later states is missing"
    WRONG = "a gradient that is not the penalty's"
    TWICE = "each step's own KL counted twice"


#: Sampled estimator -> its gradient in the reward. The formula of an estimator is the function of
#: the same name in :mod:`klrl.kl.estimators`.
SAMPLED = {"k1": Gradient.EXACT, "k2": Gradient.WRONG, "k3": Gradient.WRONG}
ESTIMATORS = (*SAMPLED, "exact")
#: placement -> estimator -> its gradient.
VERDICTS: Mapping[str, Mapping[str, Gradient]] = {
    "reward": {**SAMPLED, "exact": Gradient.WRONG},
    "loss": dict.fromkeys(ESTIMATORS, Gradient.OWN_STEP),
    "split": {**dict.fromkeys(SAMPLED, Gradient.TWICE), "exact": Gradient.EXACT},
}


def check_placement(placement: str, estimator: str, allow_biased: bool = False) -> None:
    """Refuse a placement and an estimator whose gradient is wrong.

    ``allow_biased`` accepts a wrong gradient, but never a step that is counted twice.

    Raises:
        ConfigError: a biased pair, or a split that would count a step twice.
    """
    gradient = VERDICTS[placement]["k2" if estimator == OWN else estimator]
    if gradient is Gradient.WRONG and not allow_biased:
        raise ConfigError(
            f"kl.estimator={estimator}: in the reward only k1 has the gradient of the KL "
            "(docs/kl.md); use kl.estimator=k1, kl.placement=loss or split, or set "
            "kl.allow_biased=true"
        )
    if gradient is Gradient.TWICE:
        raise ConfigError(
            f"kl.placement=split: needs the exact KL, {estimator} would count a step twice; "
            "add kl.estimator=exact"
        )


def check_divergence(divergence: str, placement: str, estimator: str) -> None:
    """Refuse a divergence whose gradient would be wrong; for reverse, see :func:`check_placement`.

    With u = pi_ref / pi and D = E_pi[f(u)], a sampled reward would need f(u) - u f'(u) at a step's
    own action and f(u) for the actions before it. Only for the reverse KL (f = -log u: k1) do the
    two differ by a constant. Also, k1, k2 and k3 estimate only the reverse KL.

    Raises:
        ConfigError: a divergence in the reward, or with a sampled estimator.
    """
    if divergence == "reverse":
        return
    if placement == "reward":
        raise ConfigError(
            f"kl.divergence={divergence}: no one number in the reward has its gradient, only the "
            "reverse KL's k1 does (docs/kl.md); add kl.placement=split kl.estimator=exact"
        )
    if estimator != "exact":
        raise ConfigError(
            f"kl.divergence={divergence}: kl.estimator={estimator} samples the reverse KL; "
            "add kl.estimator=exact"
        )
