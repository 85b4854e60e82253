"""Which estimator of KL(policy||reference) may be charged where: docs/kl.md's table, as data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from klrl.base.errors import ConfigError

#: Where the KL is charged: in the reward, in the loss, or the own step in the loss as well.
PLACEMENTS = ("reward", "loss", "split")
#: How it is estimated. The formulas: :mod:`klrl.kl.estimators`.
ESTIMATORS = ("k1", "k2", "k3", "exact")


class Gradient(Enum):
    """What a policy that samples its own actions is moved by, in expectation."""

    EXACT = "the gradient of the whole penalty"
    OWN_STEP = "the gradient of each step's own KL; the part through later states is missing"
    WRONG = "another gradient than the penalty's"
    TWICE = "the own step's part twice"


#: placement -> estimator -> its gradient.
VERDICTS: Mapping[str, Mapping[str, Gradient]] = {
    "reward": {
        "k1": Gradient.EXACT,
        "k2": Gradient.WRONG,
        "k3": Gradient.WRONG,
        "exact": Gradient.WRONG,
    },
    "loss": dict.fromkeys(ESTIMATORS, Gradient.OWN_STEP),
    "split": {
        "k1": Gradient.TWICE,
        "k2": Gradient.TWICE,
        "k3": Gradient.TWICE,
        "exact": Gradient.EXACT,
    },
}


def verdict(placement: str, estimator: str) -> Gradient:
    """The gradient of a pair.

    Raises:
        ConfigError: an unknown name.
    """
    if placement not in VERDICTS:
        raise ConfigError(f"kl.placement={placement}: choose one of {', '.join(PLACEMENTS)}")
    if estimator not in VERDICTS[placement]:
        raise ConfigError(f"kl.estimator={estimator}: choose one of {', '.join(ESTIMATORS)}")
    return VERDICTS[placement][estimator]


def check_placement(placement: str, estimator: str, allow_biased: bool = False) -> None:
    """Refuse a pair that has the wrong gradient.

    Args:
        placement: reward, loss or split.
        estimator: k1, k2, k3 or exact.
        allow_biased: let a wrong gradient pass; a step that is charged twice never does.

    Raises:
        ConfigError: an unknown name, a biased pair, or a split that would count a step twice.
    """
    gradient = verdict(placement, estimator)
    if gradient is Gradient.WRONG and not allow_biased:
        raise ConfigError(
            f"kl.estimator={estimator}: in the reward only k1 has the gradient of the KL, "
            f"{estimator}'s gradient is wrong (docs/kl.md); use kl.estimator=k1, "
            "kl.placement=loss or split, or say kl.allow_biased=true"
        )
    if gradient is Gradient.TWICE:
        raise ConfigError(
            f"kl.placement=split: takes the exact KL, {estimator} would count a step twice; "
            "add kl.estimator=exact"
        )
