"""Advantages and the update against loops written out here."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from klrl.base.errors import ConfigError, NonFiniteError
from klrl.config import AdvantageConfig
from klrl.control.run.advantage import gae
from klrl.control.run.update import ControlSteps
from klrl.losses.policy import ClipLoss, KLPENLoss, LossTerms, PolicyLoss, Scored
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import METRICS, Metric
from klrl.train.learner import Coefficients, Learner, Steps
from klrl.train.loop import Training
from tests.runs.commands import rows_of


class SumOfObservation(nn.Module):
    """V(s) = sum of the observation."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation.sum(-1, keepdim=True)


@pytest.mark.parametrize(("gamma", "lmbda"), [(0.9, 0.8), (1.0, 1.0), (0.9, 0.0)])
def test_gae_bootstraps_truncation_and_not_termination(gamma: float, lmbda: float) -> None:
    """delta_t = r_t + gamma V(s'_t) (1 - terminated) - V(s_t), cut where the episode is done."""
    torch.manual_seed(0)
    n, t, scale = 3, 40, 0.1
    observation, after = torch.randn(n, t, 2), torch.randn(n, t, 2)
    after[:, :-1] = observation[:, 1:]
    terminated = torch.rand(n, t, 1) < 0.1
    truncated = (torch.rand(n, t, 1) < 0.1) & ~terminated
    done = terminated | truncated
    after[done.squeeze(-1)] = torch.randn(int(done.sum()), 2) * 3  # the true last observations
    reward = torch.randn(n, t, 1)
    batch = TensorDict(
        {
            "observation": observation,
            "next": {
                "observation": after,
                "reward": reward,
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        [n, t],
    )
    critic = TensorDictModule(SumOfObservation(), ["observation"], ["state_value"])
    gae(AdvantageConfig(gamma, lmbda), critic, scale)(batch)
    assert truncated.any()
    assert terminated.any()
    for i in range(n):
        running = 0.0
        for step in reversed(range(t)):
            value, next_value = float(observation[i, step].sum()), float(after[i, step].sum())
            alive = 0.0 if terminated[i, step] else 1.0
            delta = scale * float(reward[i, step]) + gamma * next_value * alive - value
            running = delta + (0.0 if done[i, step] else gamma * lmbda * running)
            assert float(batch["advantage"][i, step]) == pytest.approx(running, abs=1e-4)
            assert float(batch["value_target"][i, step]) == pytest.approx(running + value, abs=1e-4)
    torch.testing.assert_close(batch["next", "reward"], reward), "the record is never scaled"


@pytest.fixture
def made(settings):
    """A small experiment and one charged rollout with its advantages."""
    experiment = Training(settings("kl.coef=0.5"))
    rollout = experiment.parts.rollout(0)
    batch = rollout.collect()
    measured = experiment.parts.charge_kl(batch)
    experiment.parts.estimate_advantage(batch)
    yield experiment, batch, measured
    rollout.close()


class OneParameter(Steps[Tensor, Tensor]):
    """Notes what it is asked for; KL(old||new) of a minibatch is 1, far above its target."""

    mode = "false"

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss, self.parameter = loss, nn.Parameter(torch.zeros(()))
        self.asked: list[Coefficients] = []

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        return [self.parameter]

    def lay_out(self, batch: Tensor) -> Tensor:
        return batch

    def minibatches(self, frames: Tensor) -> tuple[Tensor, ...]:
        return frames.chunk(3)

    def step(self, minibatch: Tensor, coefficients: Coefficients) -> Tensor:
        self.asked.append(coefficients)
        with torch.no_grad():
            self.parameter += coefficients.lr
        return torch.ones(len(self.loss.measures) + 1)

    def kl_old(self, frames: Tensor) -> float:
        return self.parameter.item() ** 2


@pytest.mark.parametrize(
    ("words", "betas", "after", "alpha"),
    [
        ((), [1.0] * 6, 2.0, 1.0),
        (("loss.beta_rule=forward",), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 64.0, 1.0),
        (("loss.line_search=back",), [1.0] * 6, 2.0, 1 / 6),
    ],
)
def test_the_algorithm_on_one_parameter(settings, words, betas, after, alpha) -> None:
    """Two epochs of three steps of 0.1, KL 0.36; a line search scales them to dtarg, 0.01."""
    config = settings("optim.lr=0.1", "optim.lr_floor=0.1", *words)
    steps = OneParameter(KLPENLoss(config.loss))
    learner = Learner(config, steps)
    learned = learner.update(torch.zeros(6), 0.0, kl_coef=0.25)
    assert [c.beta for c in steps.asked] == betas
    assert {(c.lr, c.kl_ref) for c in steps.asked} == {(0.1, 0.25)}
    assert learner.beta_rule.beta == after
    assert learned["learner/alpha"] == pytest.approx(alpha, rel=1e-3)
    assert learned["kl/old/exact"] == pytest.approx(0.36 * alpha**2, rel=1e-3)
    assert learned["loss/objective"] == -1.0
    assert learned["learner/epochs"] == 2


class FourPositions(OneParameter):
    """A unit of the loss's targets is four positions long."""

    def positions_per_unit(self, frames: Tensor) -> float:
        return 4.0


def test_a_line_search_goes_to_the_target_per_position(settings) -> None:
    """dtarg .01 is of four positions: KL .36 per position is brought to .0025, alpha to 1/12."""
    config = settings("optim.lr=0.1", "optim.lr_floor=0.1", "loss.line_search=back")
    learner = Learner(config, FourPositions(KLPENLoss(config.loss)))
    learned = learner.update(torch.zeros(6), 0.0)
    assert learner.beta_rule.dtarg == pytest.approx(0.0025)
    assert learned["learner/alpha"] == pytest.approx(1 / 12, rel=1e-3)
    assert learned["kl/old/exact"] == pytest.approx(0.0025, rel=1e-3)


@pytest.mark.parametrize(("target", "epochs"), [(0.05, 1), (0.23, 2), (0.25, 3), (0.30, 3)])
def test_the_epochs_end_at_one_and_a_half_times_the_target(settings, target, epochs) -> None:
    """KL(old||new) is .09, .36, .81 after the epochs: .36 is between 1.0 and 1.5 times .25, .30."""
    words = ("optim.lr=0.1", "optim.lr_floor=0.1", "learner.epochs=9")
    config = settings(*words, "loss=clip", f"loss.target_kl={target}")
    learned = Learner(config, OneParameter(ClipLoss(config.loss))).update(torch.zeros(6), 0.0)
    assert learned["learner/epochs"] == epochs
    assert learned["kl/old/exact"] == pytest.approx((0.3 * epochs) ** 2, rel=1e-5)


class Observing(KLPENLoss):
    """Observes one number more, of which the loss knows nothing."""

    def __call__(self, scored: Scored, *coefficients: Tensor) -> LossTerms:
        found = super().__call__(scored, *coefficients)
        return replace(found, measured=found.measured | {"learner/mine": scored.log_prob})


class Observed(OneParameter):
    """Measures, in the third step, what is no number."""

    def step(self, minibatch: Tensor, coefficients: Coefficients) -> Tensor:
        super().step(minibatch, coefficients)
        values = torch.ones(len(self.loss.measures) + 1)
        if len(self.asked) == 3:
            values[self.loss.measures.index("learner/mine")] = torch.nan
        return values


def test_a_metric_of_a_loss_is_one_entry_and_its_declaration(settings, monkeypatch) -> None:
    config = settings("optim.lr=0.1")
    with pytest.raises(ConfigError, match="^metric learner/mine: is not declared; add it to klrl/"):
        Learner(config, OneParameter(Observing(config.loss)))
    monkeypatch.setitem(METRICS, "learner/mine", Metric("learner/mine", "mine", "mine"))
    learned = Learner(config, OneParameter(Observing(config.loss))).update(torch.zeros(6), 0.0)
    assert learned["learner/mine"] == 1.0
    with pytest.raises(NonFiniteError, match="^learner/mine is nan in minibatch"):
        Learner(config, Observed(Observing(config.loss))).update(torch.zeros(6), 0.0)


class Counted(OneParameter):
    """Counts the tensors as large as its parameter that live during a step."""

    def __init__(self, loss: PolicyLoss) -> None:
        super().__init__(loss)
        self.parameter, self.alive = nn.Parameter(torch.zeros(4099)), 0

    def step(self, minibatch: Tensor, coefficients: Coefficients) -> Tensor:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        held = {x.data_ptr() for x in tensors if x.shape == (4099,)}
        self.alive = max(self.alive, len(held))
        return torch.ones(len(self.loss.measures) + 1)

    def kl_old(self, frames: Tensor) -> float:
        return 0.01


@pytest.mark.parametrize(("mode", "alive"), [("none", 1), ("both", 2)])
def test_weights_are_copied_for_a_line_search_alone(settings, mode, alive) -> None:
    config = settings(f"loss.line_search={mode}", "learner.epochs=1")
    steps = Counted(KLPENLoss(config.loss))
    Learner(config, steps).update(torch.zeros(6), 0.0)
    assert steps.alive == alive


def test_each_update_steps_at_its_own_learning_rate(made) -> None:
    experiment, batch, _ = made
    learner = experiment.parts.learner
    learner.update(batch, progress=0.0)
    experiment.config.optim.lr_floor = 0.0
    before = learner.steps.optimizer.flat.clone()
    learner.update(batch, progress=1.0)
    assert torch.equal(learner.steps.optimizer.flat, before)


def test_learning_rate_falls_linearly_to_its_floor(made) -> None:
    experiment, batch, _ = made
    experiment.parts.learner.config.optim = replace(experiment.config.optim, lr=1e-3, lr_floor=2e-4)
    update = experiment.parts.learner.update
    rates = [update(batch, progress=x)["learner/lr"] for x in (0.0, 0.25, 1.0, 1.5)]
    assert rates == pytest.approx([1e-3, 8e-4, 2e-4, 2e-4])


@pytest.mark.parametrize(
    ("key", "place"), [("advantage", "loss/objective"), ("value_target", "loss/critic")]
)
def test_what_is_not_finite_is_named(made, key: str, place: str) -> None:
    experiment, batch, _ = made
    batch[key][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=place):
        experiment.parts.learner.update(batch, progress=0.0)


def test_the_loop_moves_the_normalizer_after_the_update(settings) -> None:
    """A policy that does not learn stays what it was: KL(old||new) is 0 under one normaliser."""
    Training(settings("optim.lr=1e-12", "optim.lr_floor=0")).train(RunFolder(Path("run")))
    rows = rows_of(Path("run"))
    assert len(rows) == 2
    assert [row["kl/old/exact"] for row in rows] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert [row["kl/ref/exact"] > 1e-6 for row in rows] == [False, True], "it moved in between"


def test_a_shared_trunk_is_optimised_once(settings) -> None:
    experiment = Training(settings("actor.share_trunk=true", "loss.separate_losses=true"))
    steps = ControlSteps(experiment.config, experiment.parts.agent)
    assert len({id(p) for p in steps.parameters}) == len(steps.parameters)


#: Key -> shape and dtype, of the batches that ``noting`` was given.
GIVEN: list[dict[object, object]] = []


def kinds(batch: TensorDictBase) -> dict[object, object]:
    return {key: (value.shape, value.dtype) for key, value in batch.items(True, True)}


def noting(config, critic, reward_scale, normalizer):
    """``advantage=custom``."""
    estimate = gae(config, critic, reward_scale, normalizer)

    def noted(batch: TensorDictBase) -> None:
        GIVEN.append(kinds(batch))
        critic.module(batch["next", "observation"])
        estimate(batch)

    return noted


@pytest.mark.parametrize(
    "words",
    [
        ["actor=tanh_normal"],
        ["env=gym", "env.id=tests.control.toys:klrl-test/Keyed-v0", "+env.kwargs.image=false"],
    ],
)
def test_a_custom_advantage_is_tried_on_what_a_rollout_holds(words, settings) -> None:
    GIVEN.clear()
    small = ("collector.steps=3", "learner.minibatches=1")
    own = ("advantage=custom", "advantage.target=tests.train.test_learner:noting")
    parts = Training(settings(*words, *small, *own)).parts
    real = kinds(parts.rollout(0).collect())
    assert ("next", "step_count") in real
    assert {key: GIVEN[0].get(key) for key in real} == real
