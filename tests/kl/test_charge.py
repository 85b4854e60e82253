"""The KL's charge and measures, and the table of placements.

Through a whole run, in control and language: tests/test_one_program.py.
"""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import kl_divergence

import klrl
from klrl.base.errors import NonFiniteError
from klrl.config import RetrieveKLConfig
from klrl.config.placement import (
    ESTIMATORS,
    PLACEMENTS,
    VERDICTS,
    Gradient,
)
from klrl.control.run import kl as control_charge
from klrl.control.run.kl import make_reference_kl
from klrl.kl import charge
from klrl.kl.controllers import DualKLController
from klrl.kl.measure import mean_kl
from tests.agents import apart
from tests.transforms.toys import COEF, COUNT, actor

PACKAGE = Path(klrl.__file__).parent
PAIRS = list(itertools.product(PLACEMENTS, ESTIMATORS))
DOUBLE = torch.float64


def test_shaped_reward_and_its_shapes() -> None:
    reward, kl = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [-4.0]])
    assert charge.shaped(reward, kl, 0.5).tolist() == [[0.75], [4.0]]
    assert charge.penalized(reward, kl, torch.tensor(0.5)).tolist() == [[0.75], [4.0]]
    with pytest.raises(ValueError, match=r"reward \(2, 1\) and KL \(2,\): shapes must match"):
        charge.shaped(reward, kl[:, 0], 0.5)


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)])
def test_a_coefficient_of_0_charges_no_infinite_kl(zero) -> None:
    reward, kl = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([math.inf, -math.inf, 5.0])
    assert charge.shaped(reward, kl, zero).tolist() == [1.0, 2.0, 3.0]
    assert charge.shaped(reward, kl, zero + 1).tolist() == [-math.inf, math.inf, -2.0]


@pytest.mark.parametrize(
    ("placement", "sums"),
    [
        ("reward", [[7.0, 6.0, 4.0], [11.0, 3.0, 0.0]]),
        ("split", [[6.0, 4.0, 0.0], [3.0, 0.0, 0.0]]),
        ("loss", [[0.0] * 3, [0.0] * 3]),
    ],
)
def test_what_is_to_come_by_hand(placement: str, sums: list[list[float]]) -> None:
    kl = torch.tensor([[1.0, 2.0, 4.0], [8.0, 3.0, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert charge.to_go(kl, mask, placement).tolist() == sums
    assert charge.to_go(kl[:1], placement=placement).tolist() == sums[:1], "without a mask"
    with pytest.raises(ValueError, match="placement=later: choose one of reward, loss, split"):
        charge.to_go(kl, placement="later")


def by_name(means: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name.removeprefix("kl/ref/"): value.item() for name, value in means.items()}


def test_measures_by_hand() -> None:
    r, exact = torch.tensor([[0.0, 1.0], [-2.0, 3.0]]), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    k3 = [0.0, math.exp(-1), math.exp(2) - 3, math.exp(-3) + 2]
    means = {"exact": 3.75, "forward": 7.5, "k1": 0.5, "k2": 1.75, "k3": sum(k3) / 4}
    found = by_name(mean_kl(exact, 2 * exact, r))
    assert found == pytest.approx(means, rel=1e-6)
    mask = torch.tensor([[True, True], [True, False]])
    means = {"exact": 7 / 3, "forward": 14 / 3, "k1": -1 / 3, "k2": 2.5 / 3, "k3": sum(k3[:3]) / 3}
    sums = {f"{name}_seq": 1.5 * value for name, value in means.items()}
    hidden = [x.masked_fill(~mask, math.nan) for x in (exact, 2 * exact, r)]
    found = by_name(mean_kl(*hidden, mask))
    assert found == pytest.approx({**means, **sums}, rel=1e-6)
    with pytest.raises(NonFiniteError, match="kl/ref/exact is nan; raise kl.coef or lower optim"):
        mean_kl(*hidden)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_a_controller_moves_what_the_transform_charges(estimator: str) -> None:
    config = RetrieveKLConfig(
        coef=COEF, estimator=estimator, placement="reward", allow_biased=True, name="retrieve"
    )
    policy, reference = apart(actor())
    kl = make_reference_kl(config, policy, reference)
    assert kl is not None
    controller = DualKLController(kl, target=0.2, lr=0.5)
    controller.update(0.6)
    kl._apply(torch.clone)
    with torch.no_grad():
        data = policy(TensorDict({"observation": torch.randn(COUNT, 1, 3)}, [COUNT, 1]))
        p, q = (model.get_dist(data.copy()) for model in (policy, reference))
        by_sample = p.log_prob(data["action"]) - q.log_prob(data["action"])
        each = by_sample if estimator == "k1" else kl_divergence(p, q)
    reward = torch.full((COUNT, 1, 1), 1.7)
    for coef in (COEF * math.exp(0.5 * (0.6 / 0.2 - 1)), 0.125):
        batch = data.clone().set("next", TensorDict({"reward": reward.clone()}, [COUNT, 1]))
        control_charge.charge(batch, kl)
        torch.testing.assert_close(batch["next", "reward"], reward - coef * each[..., None])
        assert kl.coef == controller.coef == pytest.approx(coef, rel=1e-12)
        controller.load_state_dict({"coef": 0.125})


def test_the_page_has_the_table() -> None:
    """docs/kl.md: a row per placement and verdict; a split that is not there is refused."""
    page = (PACKAGE.parent / "docs" / "kl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(reward|loss|split)` \| ([^|]+) \| (exact|wrong|own-step)", page, re.M)
    words = {"exact": Gradient.EXACT, "wrong": Gradient.WRONG, "own-step": Gradient.OWN_STEP}
    told = {
        (placement, name): words[word]
        for placement, names, word in rows
        for name in re.findall(r"k1|k2|k3|exact", names)
    }
    assert told == {
        (placement, estimator): VERDICTS[placement][estimator]
        for placement, estimator in PAIRS
        if VERDICTS[placement][estimator] is not Gradient.TWICE
    }
