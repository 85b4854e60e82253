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
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor

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


COEF, SCORE, ACTION = 0.3, 1.7, 2
LOGITS = torch.tensor([0.2, -0.7, 1.1, 0.4], dtype=DOUBLE)
REF_LOGITS = torch.tensor([-0.5, 0.3, 0.6, 0.1], dtype=DOUBLE)
LOG_P = LOGITS.log_softmax(0)


def kl_by_hand(estimator: str) -> float:
    """With Python's own numbers."""
    p, q = (
        [math.exp(x) / sum(map(math.exp, table)) for x in table]
        for table in (LOGITS.tolist(), REF_LOGITS.tolist())
    )
    r = math.log(p[ACTION] / q[ACTION])
    return {
        "k1": r,
        "k2": r * r / 2,
        "k3": q[ACTION] / p[ACTION] - 1 + r,
        "exact": sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
    }[estimator]


class Table(nn.Module):
    """The same logits at every observation."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*observation.shape[:-1], -1)


def actor(logits: torch.Tensor) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(Table(logits.clone()), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def settings(placement: str, estimator: str) -> RetrieveKLConfig:
    return RetrieveKLConfig(COEF, "rollout", estimator, placement, True, name="retrieve")


def transition() -> TensorDict:
    """One step of control, [1, 1]."""
    end, zero = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, 1, dtype=DOUBLE)
    after = {"reward": torch.full((1, 1, 1), SCORE, dtype=DOUBLE), "done": end, "terminated": end}
    now = {
        "observation": zero,
        "action": torch.full((1, 1), ACTION),
        "logits": LOGITS.expand(1, 1, -1),
        "action_log_prob": LOG_P[ACTION].expand(1, 1),
    }
    return TensorDict({**now, "next": {**after, "observation": zero}}, [1, 1])


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
    kl = make_reference_kl(settings("reward", estimator), actor(LOGITS), actor(REF_LOGITS))
    assert kl is not None
    controller = DualKLController(kl, target=0.2, lr=0.5)
    controller.update(0.6)
    kl._apply(torch.clone)
    for coef in (COEF * math.exp(0.5 * (0.6 / 0.2 - 1)), 0.125):
        batch = transition()
        control_charge.charge(batch, kl)
        expected = SCORE - coef * kl_by_hand(estimator)
        assert batch["next", "reward"].item() == pytest.approx(expected, abs=1e-12)
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
