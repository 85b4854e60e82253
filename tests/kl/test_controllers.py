"""Controllers of kl.coef against their formulas, written out with numbers."""

from __future__ import annotations

import math

import pytest

from klrl.kl import (
    AdaptiveKLController,
    DualKLController,
    FixedKLController,
    ScheduledKLController,
)


def test_fixed_stays() -> None:
    controller = FixedKLController(0.3)
    assert controller.update(100.0, n=7) == 0.3


def test_adaptive_is_ziegler_et_al() -> None:
    """e = clip(KL/target - 1, -.2, .2); coef *= 1 + e n / horizon."""
    for kl, error in [(0.11, 0.1), (0.095, -0.05), (9.0, 0.2), (0.0, -0.2), (0.1, 0.0)]:
        controller = AdaptiveKLController(2.0, target=0.1, horizon=5000)
        assert controller.update(kl, n=1000) == pytest.approx(2.0 * (1 + error * 0.2))


def test_adaptive_defaults_to_a_horizon_of_ten_updates_and_moves_the_right_way() -> None:
    controller = AdaptiveKLController(1.0, target=0.1)
    assert controller.update(1.0, n=256) == pytest.approx(1.02), "too much KL: charge more"
    assert controller.update(0.0, n=256) == pytest.approx(1.02 * 0.98)


def test_dual_ascends_in_the_logarithm() -> None:
    controller = DualKLController(1.0, target=0.2, lr=0.5)
    assert controller.update(0.3) == pytest.approx(math.exp(0.5 * 0.5))
    assert controller.update(0.1) == pytest.approx(math.exp(0.25 - 0.25))


@pytest.mark.parametrize("kind", [AdaptiveKLController, DualKLController])
def test_bounds_hold(kind) -> None:
    controller = kind(1.0, target=0.1, coef_min=0.5, coef_max=2.0)
    for _ in range(300):
        controller.update(1.0)
    assert controller.coef == pytest.approx(2.0)
    for _ in range(300):
        controller.update(0.0)
    assert controller.coef == pytest.approx(0.5)
    with pytest.raises(ValueError, match="coef=0"):
        kind(0.0, target=0.1)
    with pytest.raises(ValueError, match="target=0"):
        kind(1.0, target=0.0)


def test_schedules_by_hand() -> None:
    linear = ScheduledKLController(1.0, end=0.2, frames=1000)
    assert [linear.update(0.0, n=250) for _ in range(5)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = ScheduledKLController(1.0, end=0.0, frames=1000, shape="cosine")
    expected = [(1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.5, 0.75, 1.0)]
    assert [cosine.update(0.0, n=250) for _ in range(4)] == pytest.approx(expected)
    with pytest.raises(ValueError, match="shape=square"):
        ScheduledKLController(1.0, 0.0, 10, "square")


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveKLController(1.0, 0.1),
        lambda: DualKLController(1.0, 0.1),
        lambda: ScheduledKLController(1.0, 0.0, 100),
        lambda: FixedKLController(1.0),
    ],
)
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
