"""Line search: shorten or lengthen an update so that KL(old||new) ends near its target.

theta <- theta_old + alpha (theta - theta_old), for the actor only. For small alpha the KL d grows
like alpha^2, so the search first tries sqrt(dtarg / d). Secant steps in log d and log alpha follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

#: The search ends when |ln(d / dtarg)| is below this.
TOLERANCE = 0.1
MAX_EVALUATIONS = 6
#: Bounds on the secant's slope, d ln KL / d ln alpha, which is 2 for a small step.
SLOPES = (0.7, 4.0)


def due(mode: str, kl: float, target: float) -> bool:
    """Whether to search. ``back``: if KL > 1.5 target; ``both``: also if 0 < KL < target / 1.5."""
    if mode == "always":
        return kl > 0
    return (mode != "none" and kl > 1.5 * target) or (mode == "both" and 0 < kl < target / 1.5)


@torch.no_grad()
def search(
    parameters: Sequence[nn.Parameter],
    before: Sequence[Tensor],
    measure: Callable[[], float],
    kl: float,
    target: float,
    max_alpha: float,
) -> tuple[float, float]:
    """Scale the actor's update in place; return the final alpha and KL(old||new).

    Args:
        parameters: the actor's parameters, after the update.
        before: their values before the update.
        measure: returns KL(old||new) of the whole rollout, nats per frame or token.
        kl: KL(old||new) after the update, alpha = 1.
        target: dtarg, in the unit of ``kl``.
        max_alpha: the largest alpha, >= 1.
    """
    steps = [p - old for p, old in zip(parameters, before, strict=True)]
    last_alpha, last_kl = 1.0, kl
    alpha = min(math.sqrt(target / kl), max_alpha)
    for evaluation in range(1, MAX_EVALUATIONS + 1):
        for p, old, step in zip(parameters, before, steps, strict=True):
            p.copy_(old + alpha * step)
        new_kl = measure()
        if abs(math.log(max(new_kl, 1e-12) / target)) < TOLERANCE or alpha == last_alpha:
            break
        if evaluation == MAX_EVALUATIONS:
            break
        slope = math.log(max(new_kl, 1e-12) / last_kl) / math.log(alpha / last_alpha)
        slope = min(max(slope, SLOPES[0]), SLOPES[1])
        last_alpha, last_kl = alpha, max(new_kl, 1e-12)
        alpha = min(alpha * (target / last_kl) ** (1 / slope), max_alpha)
    return alpha, new_kl
