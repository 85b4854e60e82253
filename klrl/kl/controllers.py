"""How ``kl.coef`` moves: once per iteration, on the KL of the whole rollout.

All are bounded, keep their state in checkpoints, and leave a KL that is not finite aside with a
warning (the runner stops on one). To add one: a class and its factory here, a line in
``klrl/config/choices.py``, a schema and a YAML.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from klrl.config import (
    AdaptiveControllerConfig,
    ControllerConfig,
    DualControllerConfig,
    ScheduleControllerConfig,
)


class HasCoef(Protocol):
    """Who keeps the coefficient: in a run :class:`klrl.kl.charge.ReferenceKL`."""

    coef: float


Coef: TypeAlias = float | HasCoef


@dataclass
class Number:
    """A coefficient that nobody else keeps."""

    coef: float


class FixedKLController:
    """coef stays.

    Args:
        coef: reward per nat; or who keeps it, and is moved in place.
    """

    def __init__(self, coef: Coef) -> None:
        self._keeper = Number(float(coef)) if isinstance(coef, float | int) else coef

    @property
    def coef(self) -> float:
        """The coefficient for the next rollout, reward per nat."""
        return self._keeper.coef

    @coef.setter
    def coef(self, value: float) -> None:
        self._keeper.coef = value

    def update(self, kl: float, n: int = 1) -> float:
        """Take one iteration's result.

        Args:
            kl: mean KL(policy||reference) of the rollout, nats per step.
            n: frames (samples for language) since the last call.

        Returns:
            The coefficient for the next rollout.
        """
        if not math.isfinite(kl):
            warnings.warn(f"KL(policy||reference)={kl}: coef stays at {self.coef}", stacklevel=2)
            return self.coef
        self._move(float(kl), n)
        return self.coef

    def _move(self, kl: float, n: int) -> None:
        """Change :attr:`coef`."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's state, coefficient included."""
        for name in self.state_dict():
            setattr(self, name, type(getattr(self, name))(state[name]))


class ScheduledKLController(FixedKLController):
    """coef goes from its first value to ``end`` over ``frames``, along a line or half a cosine.

    Args:
        coef: at frame 0.
        end: at frame ``frames`` and after.
        frames: how long it takes.
        shape: linear or cosine.

    Raises:
        ValueError: an unknown shape, or no frames.
    """

    def __init__(self, coef: Coef, end: float, frames: int, shape: str = "linear") -> None:
        super().__init__(coef)
        if shape not in ("linear", "cosine"):
            raise ValueError(f"shape={shape}: choose linear or cosine")
        if frames < 1:
            raise ValueError(f"frames={frames}: give a number >= 1")
        self.start, self.end, self.frames, self.shape = self.coef, float(end), frames, shape
        self.seen = 0

    def _move(self, kl: float, n: int) -> None:
        self.seen += n
        share = min(self.seen / self.frames, 1.0)
        if self.shape == "cosine":
            share = 0.5 * (1 - math.cos(math.pi * share))
        self.coef = self.start + (self.end - self.start) * share

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"coef": self.coef, "seen": self.seen}


class _MultipliedKLController(FixedKLController):
    """A coefficient that is multiplied towards a target, within bounds above 0.

    Raises:
        ValueError: a target of 0, or a start outside the bounds.
    """

    def __init__(self, coef: Coef, target: float, coef_min: float, coef_max: float) -> None:
        super().__init__(coef)
        if target <= 0:
            raise ValueError(f"target={target}: give nats > 0")
        if not 0 < coef_min <= self.coef <= coef_max:
            raise ValueError(
                f"coef={self.coef}: this controller multiplies it; start it within "
                f"coef_min={coef_min} .. coef_max={coef_max}, both > 0"
            )
        self.target, self.coef_min, self.coef_max = target, coef_min, coef_max

    def _multiply(self, factor: float) -> None:
        self.coef = min(max(self.coef * factor, self.coef_min), self.coef_max)


class AdaptiveKLController(_MultipliedKLController):
    """e = clip(KL / target - 1, -.2, .2); coef *= 1 + e n / horizon (Ziegler et al. 2019).

    TorchRL 0.14's class of that name moves the other way.

    Args:
        coef: the first coefficient, > 0.
        target: nats per step.
        horizon: frames in which coef can change by a fifth; default ten times each update's n.
        coef_min: lower bound, > 0.
        coef_max: upper bound.
    """

    def __init__(
        self,
        coef: Coef,
        target: float,
        horizon: float | None = None,
        coef_min: float = 1e-6,
        coef_max: float = 1e6,
    ) -> None:
        super().__init__(coef, target, coef_min, coef_max)
        self.horizon = horizon

    def _move(self, kl: float, n: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self._multiply(1 + error * n / (self.horizon or 10 * n))


class DualKLController(_MultipliedKLController):
    """log coef += lr (KL / target - 1): ascent on the multiplier of KL <= target.

    Args:
        coef: the first coefficient, > 0.
        target: nats per step.
        lr: step per update.
        coef_min: lower bound, > 0.
        coef_max: upper bound.
    """

    def __init__(
        self,
        coef: Coef,
        target: float,
        lr: float = 0.1,
        coef_min: float = 1e-6,
        coef_max: float = 1e6,
    ) -> None:
        super().__init__(coef, target, coef_min, coef_max)
        self.lr = lr

    def _move(self, kl: float, n: int) -> None:
        step = self.lr * (kl / self.target - 1)
        # A KL far above its target would overflow exp; no bound is further away than e^50.
        self._multiply(math.exp(min(max(step, -50.0), 50.0)))


def fixed(config: ControllerConfig, coef: Coef, frames: int) -> FixedKLController:
    """``controller=fixed``."""
    return FixedKLController(coef)


def schedule(config: ScheduleControllerConfig, coef: Coef, frames: int) -> ScheduledKLController:
    """``controller=schedule``, over the whole run where it has no frames of its own."""
    return ScheduledKLController(coef, config.end, config.frames or frames, config.shape)


def adaptive(config: AdaptiveControllerConfig, coef: Coef, frames: int) -> AdaptiveKLController:
    """``controller=adaptive``."""
    return AdaptiveKLController(
        coef, config.target, config.horizon, config.coef_min, config.coef_max
    )


def dual(config: DualControllerConfig, coef: Coef, frames: int) -> DualKLController:
    """``controller=dual``."""
    return DualKLController(coef, config.target, config.lr, config.coef_min, config.coef_max)
