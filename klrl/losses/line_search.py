"""Line search: shorten or lengthen an update so that KL(old||new) ends near its target.

theta <- theta_old + alpha (theta - theta_old), for the actor only. For small alpha the KL d grows
like alpha^2, so the search first tries sqrt(dtarg / d). Secant steps in log d and log alpha follow.
If a step leaves the interval that contains the target, the interval is bisected instead. The search
keeps the alpha whose d is nearest to dtarg; one with d > 1.5 dtarg only if every measured d is.
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

    def move(alpha: float) -> None:
        for p, old, step in zip(parameters, before, steps, strict=True):
            p.copy_(old + alpha * step)

    def kl_at(alpha: float) -> float:
        move(alpha)
        return _bounded(measure())

    def away(alpha: float) -> float:
        return abs(math.log(kls[alpha] / target))

    kls = {1.0: _bounded(kl)}
    last, alpha = 1.0, min(math.sqrt(target / kls[1.0]), max_alpha)
    kls[alpha] = kl_at(alpha)
    for _ in range(MAX_EVALUATIONS - 1):
        if away(alpha) < TOLERANCE or alpha == last:
            break
        slope = math.log(kls[alpha] / kls[last]) / math.log(alpha / last)
        slope = min(max(slope, SLOPES[0]), SLOPES[1])
        following = min(alpha * (target / kls[alpha]) ** (1 / slope), max_alpha)
        low = max((a for a, d in kls.items() if d < target), default=math.inf)
        high = min((a for a, d in kls.items() if d > target), default=0.0)
        if low < high and not low < following < high:
            following = math.sqrt(low * high)
        if following in kls:
            break
        last, alpha = alpha, following
        kls[alpha] = kl_at(alpha)
    best = min(kls, key=lambda alpha: (kls[alpha] > 1.5 * target, away(alpha), alpha))
    if best != alpha:
        move(best)
    return best, kls[best] if kls[best] < 1e12 else math.inf


def _bounded(kl: float) -> float:
    """Return ``kl`` within 1e-12 .. 1e12; NaN as 1e12."""
    return max(kl, 1e-12) if kl < 1e12 else 1e12
