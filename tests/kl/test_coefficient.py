"""Coefficients: one number, `coef` everywhere, checked, never the caller's tensor."""

import math

import pytest
import torch
from torch import nn

from klrl.kl import (
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
from tests.transforms.toys import actor


def retrieve(**kwargs) -> RetrieveKL:
    policy = actor()
    return RetrieveKL(policy, freeze(policy), **kwargs)


def loss(kind, **kwargs) -> nn.Module:
    """A loss's coefficient has a longer name, and is 0 by default."""
    known = Problem()
    named = {f"ref_kl_{name}": value for name, value in kwargs.items()}
    return kind(known.actor, known.critic, reference=known.actor, **named)


def spellings(name: str) -> tuple[str, str]:
    return ("coef", "coeff") if name in TRANSFORMS else ("ref_kl_coef", "ref_kl_coeff")


#: Whatever charges a KL, by the coefficient that it is made with.
KEEPERS = {
    "legacy": lambda **k: KLRewardTransform(actor(), **k),
    "adjustment": RewardAdjustmentTransform,
    "constrained": lambda **k: KLConstrainedTransform(actor(), **k),
    "computation": KLComputation,
    "retrieve": retrieve,
    "klpen": lambda **k: loss(KLPENPPOLoss, **k),
    "clip": lambda **k: loss(ClipPPOLoss, **k),
}
TRANSFORMS = [name for name in KEEPERS if name not in ("klpen", "clip")]
WRONG = [math.nan, -0.1, math.inf, torch.tensor([0.1, 0.2]), torch.ones(2, 2), "0.1"]


@pytest.mark.parametrize("name", KEEPERS)
def test_coef_and_its_alias_make_read_and_move(name: str) -> None:
    make, names = KEEPERS[name], spellings(name)
    default = 1.0 if name in TRANSFORMS else 0.0
    for spelling in ("coef", "coeff"):
        keeper = make(**{spelling: 0.25})
        for attribute in names:
            for value in (0.25, 0.5, torch.tensor(0.25)):
                setattr(keeper, attribute, value)
                assert [float(getattr(keeper, each)) for each in names] == [float(value)] * 2
    assert float(getattr(make(), names[0])) == default


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_no_coefficient_is_refused(name: str, wrong) -> None:
    make = KEEPERS[name]
    for spelling in ("coef", "coeff"):
        with pytest.raises((ValueError, TypeError), match="coef=.*a number >= 0"):
            make(**{spelling: wrong})
        keeper = make(coef=0.5)
        with pytest.raises((ValueError, TypeError), match="coef=.*a number >= 0"):
            setattr(keeper, spellings(name)[0], wrong)
        assert float(getattr(keeper, spellings(name)[0])) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRANSFORMS)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", TRANSFORMS)
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


def test_a_device_without_float64_takes_the_coefficient() -> None:
    """As MPS, which refuses to convert."""

    def to_device(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return x.clone()

    transform = KLComputation(coef=0.1)
    transform._apply(to_device)
    assert transform.coef.dtype == torch.float32
    assert float(transform.coef) == pytest.approx(0.1)
    transform.coef = 0.25
    assert float(transform.coef) == 0.25
