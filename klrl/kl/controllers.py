"""Controllers of ``kl.coef``: they change it once per iteration, by the KL of the whole rollout.

Checkpoints save the state of a controller. A KL that is not finite leaves coef unchanged, with a
warning. To add a controller, write a class here, and declare its constructor's arguments as
settings in ``klrl/config/schemas/penalty.py``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from klrl.config import ControllerConfig
from klrl.config.own import PartError, try_part
from klrl.kl.coefficient import coefficient


class HasCoef(Protocol):
    """An object with a coefficient; in a run :class:`klrl.kl.charge.ReferenceKL`."""

    coef: float


Coef: TypeAlias = float | HasCoef


@dataclass
class Number:
    """Stores a plain number as the coefficient, for a controller outside a run."""

    coef: float


class FixedKLController:
    """A constant coef. Base class of all controllers.

    Args:
        coef: reward per nat; or an object whose attribute ``coef`` the controller changes.
    """

    unsaved = False  # whether the controller has state that ``state_dict`` lacks

    def __init__(self, coef: Coef) -> None:
        self._keeper = coef if hasattr(coef, "coef") else Number(float(coefficient(coef)))

    @classmethod
    def of(cls, config: ControllerConfig, coef: Coef, frames: int) -> FixedKLController:
        """Make a run's controller from its settings; ``frames`` is the length of the run."""
        # ``unit`` is no argument of the constructor: the training loop reads it.
        settings = {key: each for key, each in vars(config).items() if key not in ("name", "unit")}
        return cls(coef, **settings)

    @property
    def coef(self) -> float:
        """The coefficient for the next rollout, reward per nat."""
        return float(self._keeper.coef)  # a transform's coefficient is a buffer, changed in place

    @coef.setter
    def coef(self, value: float) -> None:
        self._keeper.coef = value

    def update(self, kl: float, n: int = 1) -> float:
        """Update the coefficient by an iteration's KL; return the next rollout's coefficient.

        Args:
            kl: mean KL(policy||reference) of the rollout, in the unit of the controller's target.
            n: frames (language: responses) since the last call, > 0.
        """
        if not 0 < n < math.inf:
            raise ValueError(f"n={n}: give the frames since the last update, > 0")
        if not math.isfinite(kl):
            warnings.warn(f"KL(policy||reference)={kl}: coef stays at {self.coef}", stacklevel=2)
            return self.coef
        self.move(float(kl), n)
        return self.coef

    def move(self, kl: float, n: int) -> None:
        """Change :attr:`coef` after an iteration; arguments as in :meth:`update`, all finite."""

    def row(self) -> dict[str, float]:
        """Return the controller's metrics; called before :meth:`update` changes coef."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state, including the coefficient."""
        for name in {*self.state_dict()} & {*state}:  # an old checkpoint may lack entries
            setattr(self, name, type(getattr(self, name))(state[name]))


class ScheduledKLController(FixedKLController):
    """Changes coef to ``end`` over ``frames`` frames, linearly or along half a cosine."""

    def __init__(self, coef: Coef, end: float, frames: int, shape: str = "linear") -> None:
        super().__init__(coef)
        if shape not in ("linear", "cosine"):
            raise ValueError(f"shape={shape}: choose linear or cosine")
        if frames < 1:
            raise ValueError(f"frames={frames}: give a number >= 1")
        self.start, self.end = self.coef, float(coefficient(end, "end"))
        self.frames, self.shape, self.seen = frames, shape, 0

    @classmethod
    def of(cls, config: Any, coef: Coef, frames: int) -> FixedKLController:
        """Make the controller; ``controller.frames`` defaults to the length of the run."""
        return cls(coef, config.end, config.frames or frames, config.shape)

    def move(self, kl: float, n: int) -> None:
        """Add ``n`` to the frames so far; set coef to its value at this number of frames."""
        self.seen += n
        share = min(self.seen / self.frames, 1.0)
        if self.shape == "cosine":
            share = 0.5 * (1 - math.cos(math.pi * share))
        self.coef = self.start + (self.end - self.start) * share

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef, "seen": self.seen}


class _MultipliedKLController(FixedKLController):
    """Base of controllers that multiply coef by a factor > 0, to bring the KL to a target."""

    def __init__(self, coef: Coef, target: float, coef_min: float, coef_max: float) -> None:
        super().__init__(coef)
        if not 0 < target < math.inf:
            raise ValueError(f"target={target}: give nats > 0")
        if not 0 < coef_min <= self.coef <= coef_max:
            raise ValueError(
                f"coef={self.coef}: this controller multiplies coef; start it within "
                f"coef_min={coef_min} .. coef_max={coef_max}, both > 0"
            )
        self.target, self.coef_min, self.coef_max = target, coef_min, coef_max

    def row(self) -> dict[str, float]:
        """Return ``kl/ref/at_bound``: 1 at coef_max, -1 at coef_min; no metric in between."""
        at = (self.coef >= self.coef_max) - (self.coef <= self.coef_min)
        return {"kl/ref/at_bound": float(at)} if at else {}

    def _multiply(self, factor: float) -> None:
        self.coef = _clip(self.coef * factor, self.coef_min, self.coef_max)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


class AdaptiveKLController(_MultipliedKLController):
    """e = clip(KL / target - 1, -.2, .2); coef *= 1 + e n / horizon (Ziegler et al. 2019).

    n is the number of frames since the last update. e n / horizon is also clipped to -.2 .. .2:
    otherwise coef could become 0 at n = 5 horizon. TorchRL 0.14's AdaptiveKLController changes coef
    in the opposite direction.

    Args:
        coef: the initial coefficient, > 0.
        target: nats per step, or per sequence.
        horizon: frames in which coef can change by a fifth; None: 10 n.
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
        if horizon is not None and not 0 < horizon < math.inf:
            raise ValueError(f"horizon={horizon}: give frames > 0, or None for ten updates' frames")
        self.horizon = horizon

    def move(self, kl: float, n: int) -> None:
        """Multiply by 1 + e n / horizon."""
        error = _clip(kl / self.target - 1, -0.2, 0.2)
        horizon = 10 * n if self.horizon is None else self.horizon
        self._multiply(1 + _clip(error * n / horizon, -0.2, 0.2))


class DualKLController(_MultipliedKLController):
    """log coef += lr (KL / target - 1): dual ascent for the constraint KL <= target."""

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

    def move(self, kl: float, n: int) -> None:
        """Multiply by exp(lr (KL / target - 1))."""
        # For a KL far above its target, exp would overflow without the clip.
        self._multiply(math.exp(_clip(self.lr * (kl / self.target - 1), -50.0, 50.0)))


class HeldKLController(_MultipliedKLController):
    """PI control of x = KL / target - 1: ln coef += I clip(x, +-m) + P dx.

    dx is the change of clip(x, +-limit) since the last update, I = ``integral`` * max(s, 1 / 4) and
    P = ``proportional`` * s^2. The factor s starts at 1. It is halved when the KL has fallen from
    above :data:`SWING` * target to below target / :data:`SWING` (a swing), or when a sampled KL is
    negative. So the gains fall until the KL stops swinging or P is near 0. With P = 0 the mean of x
    over n updates is (change of ln coef) / (n I), small for large n. m = limit / max(s, 1 / 4)^2: a
    skewed KL swings, and limit would cut off its high values. While some of the last KLs were
    negative (over :data:`FEW` of them, in an exponential mean), m = limit.

    At the start of a run the policy equals its reference, and the KL needs some updates to rise.
    In these updates a low KL does not mean that coef is too high. So coef is constant until the KL
    reaches :data:`RELEASE` * target, ln KL rises by less than :data:`RISE` over :data:`WINDOW`
    updates, or :data:`PATIENCE` updates have passed.

    If a bound of coef cuts a step, the part cut off (at most P x) is added to the next step.
    Otherwise coef would leave the bound whenever the KL falls. At coef_max a swing ends at the
    target itself; at coef_min it begins there.

    Args:
        coef: the initial coefficient, > 0.
        target: nats per step, or per sequence.
        integral: gain on x, per update.
        proportional: gain on dx.
        limit: bound on abs(x), > 0.
        coef_min: lower bound, > 0.
        coef_max: upper bound.
    """

    RELEASE, RISE, WINDOW, PATIENCE = 0.8, 0.05, 5, 20
    SWING = 1.5
    FEW, MEMORY = 0.01, 0.95

    def __init__(
        self,
        coef: Coef,
        target: float,
        integral: float = 0.2,
        proportional: float = 2.0,
        limit: float = 1.0,
        coef_min: float = 1e-6,
        coef_max: float = 1e6,
    ) -> None:
        super().__init__(coef, target, coef_min, coef_max)
        for name, gain in (("integral", integral), ("proportional", proportional)):
            if not 0 <= gain < math.inf:
                raise ValueError(f"{name}={gain}: give a gain >= 0")
        if not 0 < limit < math.inf:
            raise ValueError(f"limit={limit}: give a number > 0")
        self.integral, self.proportional, self.limit = integral, proportional, limit
        self.frozen, self.updates = True, 0
        self.rising: list[float] = []  # the last KLs, while coef is constant
        self.error = 0.0  # the last update's x, clipped at +-limit
        self.negative = 0.0  # the share of negative KLs, an exponential mean
        self.share, self.above = 1.0, False  # s; whether a swing may end: KL was > SWING * target
        self.cut = 0.0  # the part of P x that a bound of coef cut off

    def move(self, kl: float, n: int) -> None:
        """Take a step of PI control, unless coef is still constant."""
        x = kl / self.target - 1
        before, self.error = self.error, _clip(x, -self.limit, self.limit)
        if self.frozen:
            before = self.error if self.updates == 0 else before
            self.frozen = not self._released(kl)
        if not self.frozen:
            self._damp(kl)
            share = max(self.share, 0.25)
            most = self.limit / (1.0 if self.negative > self.FEW else share**2)
            proportional = self.proportional * self.share**2
            step = self.integral * share * _clip(x, -most, most) + self.cut
            step += proportional * (self.error - before)
            log_coef = math.log(self.coef)
            self._multiply(math.exp(step))
            cut = log_coef + step - math.log(self.coef) if self.row() else 0.0
            most = proportional * self.error
            self.cut = _clip(cut, min(most, 0.0), max(most, 0.0))

    def row(self) -> dict[str, float]:
        """Return ``kl/ref/at_bound`` as in the base class, but only once coef may change."""
        return {} if self.frozen else super().row()

    def _damp(self, kl: float) -> None:
        """Halve s at the end of a swing, or if the KL is negative by more than rounding."""
        # At a bound of coef the KL stays on one side of its target, which is then a threshold.
        high = self.SWING if self.coef > self.coef_min else 1.0
        low = self.SWING if self.coef < self.coef_max else 1.0
        swung = self.above and kl < self.target / low
        negative = kl < -1e-6 * self.target
        self.negative += (1 - self.MEMORY) * (negative - self.negative)
        if swung or negative:
            self.share /= 2
        self.above = kl > high * self.target or (self.above and not swung)

    def _released(self, kl: float) -> bool:
        """Count the update; return whether coef may change from now on (see the class)."""
        self.updates += 1
        self.rising = [*self.rising, kl][-self.WINDOW - 1 :]
        flat = (
            len(self.rising) > self.WINDOW
            and self.rising[0] > 0
            and kl < self.rising[0] * math.exp(self.RISE)
        )
        return kl >= self.RELEASE * self.target or flat or self.updates >= self.PATIENCE

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        names = ["coef", "error", "frozen", "updates", "rising", "share", "above"]
        return {name: getattr(self, name) for name in [*names, "negative", "cut"]}


class OwnKLController(FixedKLController):
    """``controller=custom``: makes the user's subclass of :class:`FixedKLController`."""

    @classmethod
    def of(cls, config: Any, coef: Coef, frames: int) -> FixedKLController:
        """Make the user's controller and try it once."""
        start = coef if isinstance(coef, float | int) else coef.coef
        given, trial = {"coef": coef, "frames": frames}, {"coef": lambda: Number(start)}
        use = moves("kl.coef", [0.01, 1.0])
        made, unsaved = try_part("controller", config, given, FixedKLController, use, trial=trial)
        made.unsaved = unsaved
        return made


def moves(name: str, kls: Sequence[float]) -> Callable[[Any], None]:
    """Return a function that tries a custom controller or beta rule with each KL, nats."""

    def use(trial: Any) -> None:
        for kl in kls:
            moved = trial.update(kl)
            if not (isinstance(moved, float | int) and math.isfinite(moved) and moved >= 0):
                raise PartError(f"{name}={moved!r} after a KL of {kl:g} nats; give a number >= 0")

    return use
