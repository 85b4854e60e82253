"""Controllers of kl.coef against their formulas, written out with numbers."""

import json
import math
from collections.abc import Callable

import pytest
import torch

from klrl.kl import (
    AdaptiveKLController,
    DualKLController,
    FixedKLController,
    HeldKLController,
    KLComputation,
    ScheduledKLController,
)

NAN, INF = math.nan, math.inf


@pytest.fixture(
    params=[
        lambda coef=1.0: AdaptiveKLController(coef, 0.1),
        lambda coef=1.0: DualKLController(coef, 0.1),
        lambda coef=1.0: HeldKLController(coef, 0.1),
        lambda coef=1.0: ScheduledKLController(coef, 0.0, 100),
        lambda coef=1.0: FixedKLController(coef),
    ],
    ids=["adaptive", "dual", "held", "schedule", "fixed"],
)
def make(request) -> Callable[..., FixedKLController]:
    """Of every kind, starting at 1; with a target of 0.1 where it has one."""
    return request.param


@pytest.mark.parametrize(
    ("horizon", "n", "share"),
    # Ten updates by default; the last update has more frames than the horizon.
    [(5000, 1000, 0.2), (None, 256, 0.1), (10_000, 65_536, 6.5536)],
)
def test_adaptive_is_ziegler_et_al(horizon: int | None, n: int, share: float) -> None:
    """e = clip(KL/target - 1, -.2, .2); coef *= 1 + e n / horizon: too much KL, charge more.

    At most by a fifth, however many frames an update has: 1 - .2 * 6.55 would be its lower bound.
    """
    for kl, error in [(0.11, 0.1), (0.095, -0.05), (9.0, 0.2), (0.0, -0.2), (0.1, 0.0)]:
        controller = AdaptiveKLController(2.0, target=0.1, horizon=horizon)
        assert controller.update(kl, n=n) == pytest.approx(
            2.0 * (1 + min(max(error * share, -0.2), 0.2))
        )


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (AdaptiveKLController, {"coef": 0.0}, "coef=0"),
        *((AdaptiveKLController, {"target": x}, f"target={x}: give nats > 0") for x in (0.0, NAN)),
        *(
            (AdaptiveKLController, {"horizon": x}, f"horizon={x}: give f")
            for x in (0, -1, INF, NAN)
        ),
        (DualKLController, {"coef": 0.0}, "coef=0"),
        (HeldKLController, {"coef": 0.0}, "coef=0"),
        (HeldKLController, {"integral": -0.1}, "integral=-0.1: give a gain >= 0"),
        (HeldKLController, {"proportional": NAN}, "proportional=nan"),
        (HeldKLController, {"limit": 0.0}, "limit=0.0: give a number > 0"),
    ],
)
def test_what_means_nothing_is_refused(kind, words, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{"coef": 1.0, "target": 0.1, **words})


@pytest.mark.parametrize("coef", [-1.0, NAN, INF, torch.tensor(-1.0)])
def test_a_coefficient_is_a_number_from_0_on(coef) -> None:
    with pytest.raises(ValueError, match=r"coef=(-1.0|nan|inf): give a number >= 0"):
        FixedKLController(coef)
    with pytest.raises(ValueError, match=r"end=(-1.0|nan|inf): give a number >= 0"):
        ScheduledKLController(1.0, end=coef, frames=10)


@pytest.mark.parametrize("n", [0, -128])
def test_an_update_of_no_frames_is_refused(make, n: int) -> None:
    controller = make()
    with pytest.raises(ValueError, match=rf"n={n}: give the frames"):
        controller.update(0.3, n=n)
    assert controller.coef == 1.0


def test_dual_ascends_in_the_logarithm() -> None:
    controller = DualKLController(1.0, target=0.2, lr=0.5)
    assert controller.update(0.3) == pytest.approx(math.exp(0.5 * 0.5))
    assert controller.update(0.1) == pytest.approx(math.exp(0.25 - 0.25))


def test_held_is_pi_on_kl_over_target() -> None:
    """KL / target = 1.5, .75, then clipped to 2 and 0; gains .2 and 2."""
    controller = HeldKLController(2.0, target=0.1, integral=0.2, proportional=2.0, limit=1.0)
    exponent = 0.2 * 0.5
    assert controller.update(0.15) == pytest.approx(2 * math.exp(exponent))
    exponent += 0.2 * -0.25 + 2 * (-0.25 - 0.5)
    assert controller.update(0.075) == pytest.approx(2 * math.exp(exponent))
    exponent += 0.2 * 1 + 2 * (1 + 0.25)
    assert controller.update(9.0) == pytest.approx(2 * math.exp(exponent))


def test_held_damps_what_swings_and_what_is_sampled() -> None:
    """Gains .2 s, at least .05, and 2 s^2: s halves after a swing and at each negative KL."""
    controller, exponent, before = HeldKLController(1.0, target=0.1), 0.0, 0.8
    for kl, s in [(0.18, 1), (0.07, 1), (0.06, 0.5), (0.05, 0.5), (-0.2, 0.25), (-0.2, 0.125)]:
        x = max(kl / 0.1 - 1, -1)
        exponent += 0.2 * max(s, 0.25) * x + 2 * s * s * (x - before)
        before = x
        assert controller.update(kl) == pytest.approx(math.exp(exponent)), kl
    assert controller.update(0.0) == pytest.approx(math.exp(exponent - 0.05)), "0 is no sample"


def test_held_clips_a_high_kl_of_its_integral_less_once_the_kl_swings() -> None:
    """At 1, 4 and 16 for s = 1, 1/2, 1/4; at 1 once a KL was negative. P = 0."""
    controller, exponent = HeldKLController(1.0, target=0.1, proportional=0.0), 0.0
    kls = [(9.0, 1, 1), (0.03, 0.5, -0.7), (9.0, 0.5, 4), (0.03, 0.25, -0.7)]
    kls += [(9.0, 0.25, 16), (0.8, 0.25, 7), (-0.2, 0.25, -1), (9.0, 0.25, 1)]
    for kl, s, x in kls:
        exponent += 0.2 * s * x
        assert controller.update(kl) == pytest.approx(math.exp(exponent)), kl


def test_held_does_not_wind_down_while_the_kl_rises() -> None:
    """Frozen up to .8 target; the step at the release has the rise of x in it, and no jump."""
    controller = HeldKLController(1.0, target=0.1)
    kls = [0.0, 0.01, 0.02, 0.03, 0.05, 0.06, 0.07, 0.0799]
    assert [controller.update(kl) for kl in kls] == [1.0] * 8
    x, before = 0.801 - 1, 0.799 - 1
    assert controller.update(0.0801) == pytest.approx(math.exp(0.2 * x + 2 * (x - before)))
    assert controller.update(0.001) < 1, "it does not freeze again"


def test_held_is_released_where_the_kl_stops_rising() -> None:
    """ln KL rises by ln(1.04) = .039 < .05 over five updates, then x is -.5 and does not move."""
    controller = HeldKLController(1.0, target=0.1)
    assert [controller.update(kl) for kl in (0.048, 0.05, 0.05, 0.05, 0.05)] == [1.0] * 5
    assert controller.update(0.048 * 1.04) == pytest.approx(math.exp(0.2 * -0.5), rel=1e-2)
    rising = HeldKLController(1.0, target=0.1)
    assert [rising.update(0.04 * 1.011**i) for i in range(6)] == [1.0] * 6, "by .055"


@pytest.mark.parametrize("kind", [AdaptiveKLController, DualKLController, HeldKLController])
def test_bounds_hold(kind) -> None:
    controller = kind(1.0, target=0.1, coef_min=0.5, coef_max=2.0)
    for _ in range(300):
        controller.update(1.0)
    assert controller.coef == pytest.approx(2.0)
    for _ in range(300):
        controller.update(0.0)
    assert controller.coef == pytest.approx(0.5)


def test_schedules_by_hand() -> None:
    linear = ScheduledKLController(1.0, end=0.2, frames=1000)
    assert [linear.update(0.0, n=250) for _ in range(5)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = ScheduledKLController(1.0, end=0.0, frames=1000, shape="cosine")
    expected = [(1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.5, 0.75, 1.0)]
    assert [cosine.update(0.0, n=250) for _ in range(4)] == pytest.approx(expected)
    with pytest.raises(ValueError, match="shape=square"):
        ScheduledKLController(1.0, 0.0, 10, "square")


def test_state_goes_on_where_it_stopped_and_nan_is_left_aside(make) -> None:
    whole, first, second = make(), make(), make()
    for kl in (0.3, 0.05, 0.2):
        whole.update(kl, n=10)
    first.update(0.3, n=10)
    with pytest.warns(UserWarning, match="nan"):
        first.update(math.nan, n=10)
    second.load_state_dict(first.state_dict())
    second.update(0.05, n=10)
    assert second.update(0.2, n=10) == pytest.approx(whole.coef)


def test_a_transforms_coefficient_moves_as_a_number_does(make) -> None:
    """Its buffer changes in place: what an update returned, and a saved state, must not."""
    transform = KLComputation("a", "b", coef=1.0)
    held, plain = make(transform), make()
    expected = [plain.update(kl, n=25) for kl in (0.3, 0.05, 0.2)]
    assert [held.update(kl, n=25) for kl in (0.3, 0.05, 0.2)] == expected
    saved = held.state_dict()
    held.update(9.0, n=25)
    assert saved == plain.state_dict()
    held.load_state_dict({**saved, "coef": 0.7})
    assert float(transform.coef) == 0.7


@pytest.mark.parametrize("stop", range(1, 12))
@pytest.mark.parametrize(
    ("kls", "released"),
    [
        ([0.0, 0.03, 0.04, *[0.05] * 8, 0.12, 0.09], 8),
        ([0.0] * 22, 19),
        ([0.0, 0.04, 0.07, 0.09, 0.15, -0.01, *[0.5, 0.11] * 4], 3),
    ],
    ids=["the KL stops rising", "twenty updates", "near the target"],
)
def test_held_goes_on_exactly_from_any_update(kls: list[float], released: int, stop: int) -> None:
    whole, first, second = (HeldKLController(1.0, 0.1) for _ in range(3))
    expected = [whole.update(kl) for kl in kls]
    assert [coef == 1 for coef in expected].index(False) == released
    for kl in kls[:stop]:
        first.update(kl)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.update(kl) for kl in kls[stop:]] == expected[stop:]
    assert second.state_dict() == whole.state_dict()
