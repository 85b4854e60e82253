"""Coefficients: one number, `coef` everywhere, checked, never the caller's tensor."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from klrl.kl import (
    AdaptiveKLController,
    KLComputation,
    KLConstrainedTransform,
    KLRewardTransform,
    RetrieveKL,
    RewardAdjustmentTransform,
    freeze,
)
from klrl.kl.charge import ReferenceKL
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.losses.test_documented import Problem
from tests.transforms.toys import COUNT, actor, moved


def retrieve(**kwargs) -> RetrieveKL:
    policy = actor()
    return RetrieveKL(policy, freeze(policy), **kwargs)


#: Whatever charges a KL, by the coefficient that it is made with.
KEEPERS = {
    "legacy": lambda **k: KLRewardTransform(actor(), **k),
    "adjustment": RewardAdjustmentTransform,
    "constrained": lambda **k: KLConstrainedTransform(actor(), **k),
    "computation": KLComputation,
    "retrieve": retrieve,
}
WRONG = [math.nan, -0.1, math.inf, torch.tensor([0.1, 0.2]), torch.ones(2, 2), "0.1"]


@pytest.mark.parametrize("name", KEEPERS)
def test_coef_and_its_alias_make_read_and_move(name: str) -> None:
    make = KEEPERS[name]
    for spelling in ("coef", "coeff"):
        keeper = make(**{spelling: 0.25})
        for attribute in ("coef", "coeff"):
            assert float(getattr(keeper, attribute)) == 0.25
            setattr(keeper, attribute, 0.5)
            assert float(keeper.coef) == float(keeper.coeff) == 0.5
            setattr(keeper, attribute, torch.tensor(0.25))
            assert float(keeper.coef) == 0.25
    assert float(make().coef) == 1.0
    with pytest.raises(ValueError, match="coef.*coeff.*one of them"):
        make(coef=0.1, coeff=0.2)
    with pytest.raises(ValueError, match="coef.*coeff.*one of them"):
        make(coef=1.0, coeff=0.5)  # the default, given


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_no_coefficient_is_refused(name: str, wrong) -> None:
    make = KEEPERS[name]
    for spelling in ("coef", "coeff"):
        with pytest.raises((ValueError, TypeError), match="coef=.*a number >= 0"):
            make(**{spelling: wrong})
        keeper = make(coef=0.5)
        with pytest.raises((ValueError, TypeError), match="coef=.*a number >= 0"):
            setattr(keeper, spelling, wrong)
        assert float(keeper.coef) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEEPERS)
def test_the_callers_tensor_is_its_own(name: str, dtype) -> None:
    theirs = torch.tensor(0.5, dtype=dtype)
    keeper = KEEPERS[name](coef=theirs)
    theirs.fill_(9.0)
    assert float(keeper.coef) == 0.5
    keeper.coef = 0.25
    assert float(theirs) == 9.0
    keeper.coef = theirs
    keeper.coef = 0.25
    assert float(theirs) == 9.0


@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_charged_is_the_coefficient_that_was_set(name: str) -> None:
    policy = actor()
    reference = freeze(policy)
    moved(policy)
    batch = TensorDict({"observation": torch.randn(COUNT, 3)}, [COUNT])
    with torch.no_grad():
        policy(batch)
        kl = policy.log_prob(batch.copy()) - reference.log_prob(batch.copy())
    log_probs = {"p": batch["action_log_prob"], "q": batch["action_log_prob"] - kl}
    batch["next"] = {"reward": torch.full((COUNT, 1), 2.0), "kl_penalty": kl[:, None], **log_probs}
    keeper = {
        "legacy": lambda: KLRewardTransform(reference),
        "adjustment": RewardAdjustmentTransform,
        "constrained": lambda: KLConstrainedTransform(reference),
        "computation": lambda: KLComputation("p", "q"),
        "retrieve": lambda: RetrieveKL(policy, reference),
    }[name]()
    keeper.coef = 0.5
    torch.testing.assert_close(keeper(batch)["next", "reward"], 2 - 0.5 * kl[:, None])


def test_a_move_to_another_type_keeps_the_setter() -> None:
    for make in KEEPERS.values():
        keeper = make(coef=0.25).to(torch.float32)
        keeper.coef = 0.5
        assert float(keeper.coef) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", KEEPERS)
def test_a_cast_of_the_weights_does_not_round_it(name: str, dtype) -> None:
    keeper = KEEPERS[name](coef=0.1)  # .1001 in bfloat16
    held = keeper.coef
    keeper.to(dtype)
    assert float(keeper.coef) == 0.1
    keeper.coef = 1 + 1e-6  # 1 in both short types
    assert float(keeper.coef) == 1 + 1e-6
    if isinstance(held, torch.Tensor):
        assert keeper.coef is held, "controllers hold it too"
        keeper.to("meta", dtype)
        assert keeper.coef.device.type == "meta"


@pytest.mark.parametrize("cast", [torch.nn.Module.half, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
def test_a_cast_loss_keeps_its_numbers_and_casts_its_weights(kind, cast) -> None:
    known = Problem()
    beta = {"beta": 0.3} if kind is KLPENPPOLoss else {}
    loss = cast(kind(known.actor, known.critic, reference=known.actor, ref_kl_coef=0.1, **beta))
    assert float(loss.ref_kl_coef) == 0.1
    assert float(loss.entropy_coeff) == pytest.approx(0.01, rel=1e-6)
    for name, value in beta.items():
        assert float(getattr(loss, name)) == pytest.approx(value, rel=1e-6)
    assert {p.dtype for p in loss.parameters()} == {cast(torch.nn.Linear(1, 1)).weight.dtype}


@pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
def test_the_losses_coefficient(kind) -> None:
    known = Problem()
    for spelling in ("ref_kl_coef", "ref_kl_coeff"):
        loss = kind(known.actor, known.critic, reference=known.actor, **{spelling: 0.25})
        for attribute in ("ref_kl_coef", "ref_kl_coeff"):
            assert float(getattr(loss, attribute)) == 0.25
            setattr(loss, attribute, 0.5)
            assert float(loss.ref_kl_coef) == float(loss.ref_kl_coeff) == 0.5
            setattr(loss, attribute, 0.25)
        for wrong in WRONG:
            with pytest.raises((ValueError, TypeError), match="ref_kl_coef=.*a number >= 0"):
                kind(known.actor, known.critic, **{spelling: wrong})
    with pytest.raises(ValueError, match="one of them"):
        kind(known.actor, known.critic, ref_kl_coef=0.1, ref_kl_coeff=0.2)
    with pytest.raises(ValueError, match="one of them"):
        kind(known.actor, known.critic, ref_kl_coef=0.0, ref_kl_coeff=0.5)


def test_a_runs_coefficient() -> None:
    for wrong in WRONG:
        with pytest.raises((ValueError, TypeError), match="coef=.*a number >= 0"):
            ReferenceKL(wrong, "k1", "reward")
    theirs = torch.tensor(0.5, dtype=torch.float64)
    kl = ReferenceKL(theirs, "k1", "reward")
    kl.coef = 0.25
    assert float(theirs) == 0.5
    with pytest.raises(ValueError, match="coef=nan"):
        kl.coef = math.nan


def test_a_controller_moves_a_transform() -> None:
    """Ziegler's rule by hand: KL / target - 1 is clipped to .2, and n / horizon is 1/10."""
    transform = KLRewardTransform(actor(), 0.5)
    AdaptiveKLController(transform, target=0.1).update(1.0, n=100)
    assert float(transform.coef) == pytest.approx(0.5 * 1.02)
