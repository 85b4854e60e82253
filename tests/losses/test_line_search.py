"""The line search on a function whose KL is known, and the proportional rule."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from klrl.losses import line_search
from klrl.losses.beta import make_beta_rule
from tests.conftest import QUICK
from tests.losses.test_functional import KLPEN
from tests.runs.commands import exits, rows_of


@pytest.mark.parametrize("power", [2.0, 1.2, 3.0])
@pytest.mark.parametrize("kl", [0.5, 0.02, 0.0055])
def test_the_search_ends_at_the_target(power: float, kl: float) -> None:
    before = [torch.tensor([1.0, 2.0])]
    parameter = torch.nn.Parameter(torch.tensor([4.0, -2.0]))
    seen = []

    def measure() -> float:
        alpha = float((parameter.detach() - before[0]).norm()) / 5
        seen.append(alpha)
        return kl * alpha**power

    alpha, found = line_search.search([parameter], before, measure, kl, 0.01, 2.0)
    assert len(seen) <= 6
    assert alpha <= 2.0
    assert abs(math.log(found / 0.01)) < 0.1
    assert found == pytest.approx(kl * alpha**power, rel=1e-4)
    torch.testing.assert_close(parameter.detach(), before[0] + alpha * torch.tensor([3.0, -4.0]))


@pytest.mark.parametrize("most", [1.0, 2.0, 8.0])
def test_it_never_goes_beyond_the_longest_step(most: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))

    measured = []

    def measure() -> float:
        measured.append(float(parameter.detach()))
        return 1e-6 * measured[-1] ** 2

    alpha, found = line_search.search([parameter], [torch.zeros(1)], measure, 1e-6, 0.01, most)
    assert alpha == most
    assert float(parameter.detach()) == most
    assert found == pytest.approx(1e-6 * most**2)
    assert measured == [most], "once"


@pytest.mark.parametrize("steep", [40.0, 400.0])
def test_at_a_cliff_it_ends_at_the_nearest_kl_that_it_measured(steep: float) -> None:
    """Below alpha = .7 the KL is far too small, above it 13 nats, as where a categorical jumps."""
    parameter, seen = torch.nn.Parameter(torch.ones(1)), {}

    def kl_at(alpha: float) -> float:
        return 1e-4 * alpha**2 + 13 / (1 + math.exp(steep * (0.7 - alpha)))

    def measure() -> float:
        alpha = float(parameter.detach())
        return seen.setdefault(alpha, kl_at(alpha))

    alpha, found = line_search.search([parameter], [torch.zeros(1)], measure, kl_at(1), 0.01, 4.0)
    below = [kl for kl in seen.values() if kl <= 0.015]
    nearest = min(below, key=lambda kl: abs(math.log(kl / 0.01)))
    assert found == nearest == seen[float(parameter.detach())]
    assert float(parameter.detach()) == pytest.approx(alpha)
    assert len(seen) <= 6
    assert steep > 40 or abs(math.log(found / 0.01)) < math.log(1.5), "a bracket halves the rest"


@pytest.mark.parametrize("beyond", [math.inf, math.nan])
def test_a_step_whose_kl_is_no_number_is_shortened(beyond: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))

    def measure() -> float:
        alpha = float(parameter.detach())
        return 1e-3 * alpha**2 if alpha < 1.5 else beyond

    _, found = line_search.search([parameter], [torch.zeros(1)], measure, 1e-3, 0.01, 4.0)
    assert 1e-3 < found < 2.25e-3
    alpha, found = line_search.search(
        [parameter], [torch.zeros(1)], lambda: beyond, beyond, 0.01, 4.0
    )
    assert alpha < 1e-6, "the shortest step of those tried"
    assert found == math.inf


def test_a_kl_far_above_the_target_is_kept_only_if_all_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))

    def measure() -> float:
        alpha = float(parameter.detach())
        return 1e-5 * alpha**2 if alpha < 0.3 else 5.0

    alpha, found = line_search.search([parameter], [torch.zeros(1)], measure, 5.0, 0.01, 2.0)
    assert alpha < 0.3
    assert found < 1e-6


def test_when_it_runs() -> None:
    kls = (0.0151, 0.0149, 0.0067, 0.0066, 0.0)
    expected = {
        "none": [False] * 5,
        "back": [True, False, False, False, False],
        "both": [True, False, False, True, False],
    }
    for mode, due in expected.items():
        assert [line_search.due(mode, kl, 0.01) for kl in kls] == due


def test_proportional_is_its_formula_and_bounded() -> None:
    for kl, factor in [(0.04, 2.0), (0.0025, 0.5), (100.0, 4.0), (0.0, 0.25), (0.01, 1.0)]:
        rule = make_beta_rule(replace(KLPEN, beta=1.0, beta_rule="proportional"))
        assert rule.update(kl) == pytest.approx(factor)
    rule = make_beta_rule(replace(KLPEN, beta=1.0, beta_rule="proportional"))
    for _ in range(100):
        rule.update(100.0)
    assert rule.beta == 1e4


@pytest.mark.integration
def test_beta_follows_the_annealed_target(tmp_path: Path) -> None:
    """Without a line search, each beta is the one before times (KL / target)^gain, at most 4."""
    words = ("loss.beta_rule=proportional", "loss.dtarg=0.02", "loss.dtarg_end=0.002")
    exits(*QUICK, *words, "loss.gain=0.1", "frames=512", "optim.lr=0.01", "hydra.run.dir=run")
    rows = rows_of(tmp_path / "run")
    for row, later in pairwise(rows):
        factor = (row["kl/old/exact"] / row["kl/old/target"]) ** 0.1
        expected = row["kl/old/beta"] * min(max(factor, 0.25), 4.0)
        assert later["kl/old/beta"] == pytest.approx(max(expected, 1e-4), rel=1e-5)


def test_the_search_moves_the_actor_alone(settings) -> None:
    from klrl.train.loop import Training

    results = []
    for mode in ("none", "both"):
        torch.manual_seed(0)
        experiment = Training(settings("optim.lr=0.01", f"loss.line_search={mode}"))
        rollout = experiment.parts.rollout(0)
        batch = rollout.collect()
        experiment.parts.charge_kl(batch)
        experiment.parts.estimate_advantage(batch)
        torch.manual_seed(1)
        learned = experiment.parts.learner.update(batch, 0.0)
        rollout.close()
        results.append((experiment, learned))
    (plain, before), (held, after) = results
    assert after["learner/alpha"] != 1.0
    assert abs(math.log(after["kl/old/exact"] / 0.01)) < abs(
        math.log(before["kl/old/exact"] / 0.01)
    )
    for a, b in zip(
        plain.parts.agent.value_net.parameters(),
        held.parts.agent.value_net.parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert plain.parts.learner.beta_rule.beta == held.parts.learner.beta_rule.beta, (
        "it sees the KL before"
    )
