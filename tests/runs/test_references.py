"""References that move, policies that start from trained ones, coefficients that move: in runs."""

import itertools
from pathlib import Path

import pytest
import torch

import klrl
from klrl.config import EMAReferenceConfig, PeriodicReferenceConfig, ReferenceConfig
from klrl.control.policy.networks import ObservationNormalizer
from klrl.kl.reference import (
    AdapterOffReference,
    EMAReference,
    FrozenReference,
    OtherPolicyReference,
    PeriodicReference,
    ReferenceRule,
    freeze,
)
from klrl.runs.folder import RunFolder
from klrl.runs.resume import stored_config
from klrl.train.loop import Training
from tests.conftest import QUICK, marked
from tests.runs.commands import exits, rows_of, timeless

PLAIN = ReferenceConfig(name="initial")


def ema(decay: float) -> EMAReference:
    return EMAReference(EMAReferenceConfig(decay, name="ema"))


def network() -> torch.nn.Module:
    return torch.nn.Sequential(ObservationNormalizer(2), torch.nn.Linear(2, 1))


def test_ema_is_the_weighted_mean_of_weights_and_normaliser() -> None:
    actor, reference = network(), network()
    actor[0].update(torch.randn(50, 2) * 3 + 1)
    before = {k: v.clone() for k, v in reference.state_dict().items()}
    ema(0.9).update(reference, actor, 1)
    for name, value in reference.state_dict().items():
        expected = 0.9 * before[name] + 0.1 * actor.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def tied() -> torch.nn.Module:
    """Weights with two names in a state_dict, and one storage."""
    return torch.nn.Sequential(*[torch.nn.Linear(3, 3, bias=False)] * 2)


def test_tied_weights_are_counted_once() -> None:
    assert FrozenReference(ReferenceRule(PLAIN), tied()).bytes == 4 * 9


def test_ema_moves_tied_weights_once() -> None:
    actor, reference = tied(), tied()
    before, now = reference[0].weight.detach().clone(), actor[0].weight.detach().clone()
    ema(0.8).update(reference, actor, 1)
    torch.testing.assert_close(reference[0].weight, 0.8 * before + 0.2 * now)


def test_periodic_copies_when_it_is_due() -> None:
    actor, reference = network(), network()
    kept = freeze(reference)
    rule = PeriodicReference(PeriodicReferenceConfig(3, name="periodic"))
    for iteration, same_as in ((1, kept), (2, kept), (3, actor)):
        rule.update(reference, actor, iteration)
        assert torch.equal(reference[1].weight, same_as[1].weight), iteration


def test_a_reference_starts_as_its_rule_says() -> None:
    policy, other = network(), network()
    made = FrozenReference.start(ema(0.5), policy, pytest.fail)
    assert made.module is not policy
    assert torch.equal(made.module[1].weight, policy[1].weight)
    assert made.bytes == 8 * (1 + 2 + 2) + 4 * (2 + 2 + 2 + 1), "statistics; what acts"
    made = FrozenReference.start(OtherPolicyReference(PLAIN), policy, lambda: (other, {"a": 1}))
    assert made.module is other
    assert made.description == {"a": 1}
    for reference in (made, FrozenReference.start(ReferenceRule(PLAIN), policy, pytest.fail)):
        modules, parameters = reference.module.modules(), reference.module.parameters()
        assert not any(module.training for module in modules)
        assert not any(parameter.requires_grad for parameter in parameters)
    live = FrozenReference.start(AdapterOffReference(PLAIN), policy, pytest.fail)
    assert live.module is policy
    assert live.bytes == 0
    assert policy.training
    assert policy[1].weight.requires_grad, "the policy is to be trained"


@pytest.mark.integration
def test_a_periodic_reference_is_the_policy_again_after_each_reset() -> None:
    words = ("reference=periodic", "reference.every=2", "kl=legacy", "kl.apply=step")
    exits(*QUICK, *words, "frames=320", "hydra.run.dir=run", "optim.lr=0.01", "kl.coef=0.5")
    rows = rows_of(Path("run"))
    distances = [row["kl/ref/exact"] for row in rows]
    assert [d < 1e-6 for d in distances] == [True, False, True, False, True]
    for row in rows:
        assert row["kl/ref/penalty"] == pytest.approx(0.5 * row["kl/ref/k1"], abs=1e-5)


@pytest.mark.parametrize(
    ("reference", "controller"),
    marked(
        "slow",
        itertools.product(("ema", "periodic"), ("adaptive", "dual", "held", "schedule")),
        *(("ema", "adaptive"), ("periodic", "dual"), ("ema", "held"), ("periodic", "schedule")),
    ),
)
@pytest.mark.integration
def test_a_resumed_run_has_the_anchor_of_one_that_never_stopped(reference, controller) -> None:
    """The first iteration after resume differs in its episodes, not in reference or coefficient."""
    words = (f"reference={reference}", f"controller={controller}", "kl.coef=0.5", "optim.lr=0.01")
    words += ("controller.target=1e-4",) if controller == "held" else ()  # so that it is released
    exits(*QUICK, *words, "frames=192", "hydra.run.dir=run")
    stopped = Training(stored_config(Path("run")), RunFolder(Path("run")).manifest)
    stopped.checkpoints(RunFolder(Path("run"))).load_last(stopped.parts.device)
    rows = rows_of(Path("run"))
    assert stopped.parts.kl.coef == stopped.controller.coef != 0.5
    exits("resume=run", "frames=256")
    after = rows_of(Path("run"))
    assert timeless(after[:3]) == timeless(rows)
    assert after[3]["kl/ref/coef"] == stopped.parts.kl.coef
    assert 1e-9 < after[3]["kl/ref/exact"] < 1.0


@pytest.mark.integration
def test_the_row_tells_the_coefficient_that_was_charged_and_the_next_one_moves() -> None:
    words = ("controller=dual", "controller.target=0.01", "controller.lr=0.5", "kl.coef=1")
    exits(*QUICK, *words, "frames=256", "hydra.run.dir=run", "optim.lr=0.01")
    rows = rows_of(Path("run"))
    import math

    coef = 1.0
    for row in rows:
        assert row["kl/ref/coef"] == pytest.approx(coef, rel=1e-9)
        coef *= math.exp(0.5 * (row["kl/ref/exact"] / 0.01 - 1))


@pytest.mark.integration
def test_a_controller_counts_the_frames_of_an_iteration() -> None:
    """From 1 to 0 over 256 frames, 64 in an iteration."""
    words = ("controller=schedule", "controller.end=0", "kl.coef=1", "frames=256")
    exits(*QUICK, *words, "hydra.run.dir=run")
    coefs = [row["kl/ref/coef"] for row in rows_of(Path("run"))]
    assert coefs == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.integration
def test_actor_init_starts_from_a_trained_policy_with_its_normaliser() -> None:
    exits(*QUICK, "frames=512", "optim.lr=0.01", "hydra.run.dir=trained")
    trained = klrl.load_policy("trained")
    words = ("experiment=finetune", "actor.init=trained", "env.kwargs.g=12")
    exits(*QUICK, *words, "frames=128", "hydra.run.dir=tuned")
    rows = rows_of(Path("tuned"))
    assert rows[0]["kl/ref/exact"] < 1e-6, "anchored to what it started from"
    assert rows[1]["kl/ref/exact"] > 1e-8
    config = stored_config(Path("tuned"))
    assert (config.env.kwargs["g"], config.kl.coef) == (12, None)
    start = Training(config)
    for name, value in trained.state_dict().items():
        assert torch.equal(start.parts.agent.actor.state_dict()[name], value), name
        assert torch.equal(start.parts.reference.module.state_dict()[name], value), name
    assert start.parts.agent.normalizer.count == 512
