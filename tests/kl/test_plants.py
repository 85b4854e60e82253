"""Controllers on plants of a known response."""

import math
from statistics import mean

import pytest

from klrl.kl import DualKLController, FixedKLController, HeldKLController
from tests.kl.plants import ERROR, PLANTS, SPREADS, START, TARGET, Plant, held, skewed


def test_a_plant_goes_to_its_target_at_a_coefficient_of_one() -> None:
    """ln KL - ln target shrinks by 1 - a per update; a coef of e shifts it by -g, delayed."""
    away = math.log(START / TARGET)
    ratios = Plant(0.2, 0.5).run(FixedKLController(1.0))
    assert [math.log(r) for r in ratios[:3]] == pytest.approx([away * 0.8**t for t in (1, 2, 3)])
    assert math.log(Plant(0.2, 0.5).run(FixedKLController(math.e))[-1]) == pytest.approx(-0.5)

    class Late(FixedKLController):
        def move(self, kl: float, n: int) -> None:
            self.coef = math.e

    ratios = Plant(1.0, 2.0, delay=3).run(Late(1.0))
    assert [math.log(r) for r in ratios[:6]] == pytest.approx([0, 0, 0, 0, -2, -2])


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_held_holds_every_target_that_can_be_reached(plant: Plant) -> None:
    def make() -> HeldKLController:
        return HeldKLController(0.3, TARGET)

    assert held(plant, make)[0] == pytest.approx(1, abs=0.01)
    assert mean(held(plant, make, ERROR)) == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("spread", [0.0, *SPREADS])
@pytest.mark.parametrize("coef", [0.01, 1.0])
def test_held_holds_the_mean_of_a_kl_with_a_skewed_error(coef: float, spread: float) -> None:
    runs = [skewed(HeldKLController(coef, TARGET), spread, seed) for seed in range(30)]
    assert mean(runs) == pytest.approx(1, abs=0.02)


def test_held_forgets_one_negative_kl() -> None:
    """After it the clip of the integral is narrow for thirty updates only."""

    def run(seed: int) -> float:
        controller = HeldKLController(0.3, TARGET)
        controller.frozen = False
        controller.update(-1e-3)
        return skewed(controller, 0.8, seed)

    assert mean(map(run, range(30))) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("a", [0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("g", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("bound", [0.2, 0.75, 0.9, 1.3, 4.0])
def test_held_stays_at_a_bound_that_keeps_the_target_out_of_reach(a, g, bound: float) -> None:
    """coef = 1 would be needed; at the bound KL / target is bound^-g."""
    for share in (1, 3, 10):
        low, high, start = (
            (1e-6, bound, bound / share) if bound < 1 else (bound, 1e6, bound * share)
        )
        controller = HeldKLController(start, TARGET, coef_min=low, coef_max=high)
        assert mean(Plant(a, g).run(controller)[200:]) == pytest.approx(bound**-g, rel=0.02)
        assert controller.coef == bound


@pytest.mark.parametrize("kind", [HeldKLController, DualKLController])
@pytest.mark.parametrize(("low", "high", "bound"), [(0.01, 0.5, 1.0), (2.0, 9.0, -1.0)])
def test_a_row_says_that_the_target_is_out_of_reach(kind, low, high, bound: float) -> None:
    """coef = 1 would be needed. At its bound KL / target is bound^-g."""
    controller = kind(0.3 if bound > 0 else 3.0, TARGET, coef_min=low, coef_max=high)
    assert controller.row() == {}
    ratio = Plant(0.5, 1.0).run(controller)[-1]
    assert controller.row() == {"kl/ref/at_bound": bound}
    assert ratio == pytest.approx(1 / controller.coef)


def test_a_start_at_a_bound_says_nothing_of_the_target_before_coef_moves() -> None:
    controller = HeldKLController(1.0, TARGET, coef_max=1.0)
    controller.update(0.1 * TARGET)
    assert controller.row() == {}
    for _ in range(3):
        controller.update(2 * TARGET)
    assert controller.row() == {"kl/ref/at_bound": 1.0}
