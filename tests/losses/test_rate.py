"""``optim.rate=kl_adaptive`` against the published rule, by hand."""

import json

import pytest
import torch
from torch import Tensor

from klrl.config import OptimConfig
from klrl.losses.policy import ClipLoss
from klrl.train.learner import Coefficients, KLAdaptiveRate, Learner
from tests.train.test_learner import OneParameter

CONFIG = OptimConfig(
    name="adam", lr=1e-3, lr_floor=0.0, rate="kl_adaptive", kl_target=0.01, eps=1e-5
)


def test_the_rate_moves_by_half_where_the_kl_is_off_by_two() -> None:
    rate, lr = KLAdaptiveRate(CONFIG), 1e-3
    for kl, factor in [(0.0201, 1 / 1.5), (0.0199, 1), (0.0051, 1), (0.0049, 1.5), (0.0, 1)]:
        lr *= factor
        assert rate.update(kl) == pytest.approx(lr), kl
    again = KLAdaptiveRate(CONFIG)
    again.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    assert again.update(1.0) == rate.update(1.0)


@pytest.mark.parametrize(("kl", "bound"), [(1.0, 1e-5), (1e-6, 1e-2)])
def test_the_rate_is_bounded(kl: float, bound: float) -> None:
    rate = KLAdaptiveRate(CONFIG)
    assert [rate.update(kl) for _ in range(50)][-1] == pytest.approx(bound)


def test_each_gradient_step_has_the_rate_of_the_minibatch_before(settings) -> None:
    """Two epochs of three steps: all minibatches have a KL of 1, the first before any step."""
    config = settings("loss=clip", "optim.lr=0.01", "optim.rate=kl_adaptive")
    steps = OneParameter(ClipLoss(config.loss))
    learner = Learner(config, steps)
    learner.update(torch.zeros(6), 0.9)
    assert [c.lr for c in steps.asked] == pytest.approx([0.01 / 1.5**i for i in [0, *range(5)]])
    learned = learner.update(torch.zeros(6), 0.9)
    assert learned["learner/lr"] == pytest.approx(0.01 / 1.5**10), "the next step's"


class Rounded(OneParameter):
    """KL(old||new) is lr^2 after a step; the minibatch's, before it, is rounding."""

    def step(self, minibatch: Tensor, coefficients: Coefficients) -> Tensor:
        self.parameter.data.zero_()
        return super().step(minibatch, coefficients) * 1e-14


@pytest.mark.parametrize("words", [("learner.epochs=1",), ("loss.target_kl=1e-9",)])
@pytest.mark.parametrize(("lr", "kept"), [(0.5, 0.5 / 1.5**4), (0.01, 0.01 * 1.5**5)])
def test_the_rate_follows_the_kl_of_a_single_step(lr, kept, words, settings) -> None:
    config = settings(
        "loss=clip", "optim.rate=kl_adaptive", "optim.lr_max=1", f"optim.lr={lr}", *words
    )
    learner = Learner(config, Rounded(ClipLoss(config.loss)))
    rates = [learner.update(torch.zeros(1), 0.0)["learner/lr"] for _ in range(9)]
    assert rates[-3:] == pytest.approx([kept] * 3), "kl_target / 2 < lr^2 < 2 kl_target"
