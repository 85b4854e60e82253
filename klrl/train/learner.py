"""Epochs of minibatches over one rollout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from klrl.base.errors import NonFiniteError


@dataclass(frozen=True)
class Learned:
    """What one iteration's update gave; means over its minibatches where not said otherwise.

    Attributes:
        objective, critic, entropy: the loss terms as they were minimised.
        policy_entropy: nats per frame.
        kl_ref: coef * KL(policy||reference) as the loss charged it.
        kl_old: KL(old||new) over the whole rollout, after the update, nats per frame.
        alpha: share of the actor's step that was kept (``loss.line_search``).
        beta: the coefficient that the update started with.
        grad_norm: Euclidean norm before clipping.
        lr: the learning rate.
        epochs: passes made (``loss.target_kl`` may end them early).
    """

    objective: float
    critic: float
    entropy: float
    policy_entropy: float
    kl_ref: float
    kl_old: float
    alpha: float
    beta: float
    grad_norm: float
    lr: float
    epochs: int


def require_finite(metrics: Tensor, names: tuple[str, ...], minibatches: int) -> None:
    """Name the first term, of the first minibatch, that is not finite."""
    bad = (~torch.isfinite(metrics)).nonzero()
    if len(bad):
        step, term = bad[0].tolist()
        raise NonFiniteError(
            f"{_TOLD.get(names[term], names[term])} is {float(metrics[step, term])} in minibatch "
            f"{step % minibatches} of epoch {step // minibatches + 1}; "
            "lower optim.lr or look at the rewards"
        )


#: What a measure is called where it is not finite.
_TOLD = {
    "gain": "loss/objective",
    "distance": "loss/critic",
    "entropy": "policy/entropy",
    "kl_old": "KL(old||new)",
    "kl_ref": "loss/kl_ref",
    "grad_norm": "gradient",
}
