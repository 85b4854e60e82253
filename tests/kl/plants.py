"""Plants, whose response to kl.coef is known, for the controllers.

A plant moves ln KL a share a per update towards ln target - g ln coef, so that coef = 1 gives the
target. With a delay of d it answers the coefficient of d updates before. A sampled KL has a
normal error of standard deviation :data:`ERROR` sqrt(KL target): at the target 30 % of them are
negative. The variance of k1 grows like the KL, hence the root.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from klrl.kl import FixedKLController

TARGET, START, UPDATES, SEEDS = 0.3, 1e-3, 400, 50
#: P(1 + ERROR z < 0) = .3 for a standard normal z.
ERROR = 1 / 0.524401


@dataclass(frozen=True)
class Plant:
    """ln KL += a (ln target - g ln coef - ln KL), with the coef of ``delay`` updates before."""

    a: float
    g: float
    delay: int = 0

    def run(self, controller: FixedKLController, error: float = 0.0, seed: int = 0) -> list[float]:
        """KL / target after each update."""
        draw, log_kl = random.Random(seed), math.log(START)
        coefs, ratios = [controller.coef] * (self.delay + 1), []
        for _ in range(UPDATES):
            log_kl += self.a * (math.log(TARGET) - self.g * math.log(coefs.pop(0)) - log_kl)
            kl = math.exp(min(log_kl, 50.0))
            controller.update(kl + error * math.sqrt(kl * TARGET) * draw.gauss(0, 1))
            coefs.append(controller.coef)
            ratios.append(kl / TARGET)
        return ratios


PLANTS = [
    *(Plant(a, g) for a in (0.2, 0.5, 0.8, 1.0) for g in (0.5, 1.0, 2.0)),
    *(Plant(0.3, 1.0, delay) for delay in (1, 5)),
]


#: Standard deviations of ln(measured KL / true KL).
SPREADS = (0.2, 0.4, 0.6, 0.8, 1.0)


def skewed(controller: FixedKLController, spread: float, seed: int) -> float:
    """Mean KL / target over updates 301 to 600, if the measured KL is log-normal around the true.

    ln KL moves .3 of the way to ln target - (ln coef - ln .1); the error's factor has a mean of 1.
    """
    draw, log_kl, ratios = random.Random(seed), math.log(START), []
    for _ in range(600):
        log_kl += 0.3 * (math.log(TARGET) - math.log(controller.coef / 0.1) - log_kl)
        kl = math.exp(log_kl)
        controller.update(kl * math.exp(spread * draw.gauss(0, 1) - spread**2 / 2))
        ratios.append(kl / TARGET)
    return mean(ratios[300:])


def held(plant: Plant, make: Callable[[], FixedKLController], error: float = 0.0) -> list[float]:
    """Mean KL / target over the last half, of each seed; one without error."""
    seeds = range(SEEDS if error else 1)
    return [mean(plant.run(make(), error, seed)[UPDATES // 2 :]) for seed in seeds]
