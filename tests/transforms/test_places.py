"""Transforms wherever a user puts them: the same numbers, one coefficient.

Each place is built around one transform that the user holds; the KL of a rollout is compared with
log pi - log pi_ref of its own actions, and the coefficient is moved through the held object.
"""

import pytest
import torch
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    EnvBase,
    FrameSkipTransform,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from klrl.kl import RetrieveKL
from tests.transforms.test_control_family import case
from tests.transforms.toys import COEF, charge

pytestmark = pytest.mark.filterwarnings("ignore:no .*log_prob.* for some actions:UserWarning")
KINDS = ("constrained", "retrieve", "legacy")


def held(kind: str, actor: nn.Module, reference: nn.Module) -> nn.Module:
    return charge(kind, actor, reference, raw_reward_key="raw")


def appended(env: EnvBase, kl: nn.Module) -> TransformedEnv:
    return TransformedEnv(env, kl).append_transform(StepCounter()).append_transform(RewardSum())


def inserted(env: EnvBase, kl: nn.Module) -> TransformedEnv:
    around = TransformedEnv(env, kl)
    around.insert_transform(0, StepCounter())
    return around


PLACES = {
    "alone": TransformedEnv,
    "first": lambda env, kl: TransformedEnv(env, Compose(kl, StepCounter())),
    "last": lambda env, kl: TransformedEnv(env, Compose(StepCounter(), RewardSum(), kl)),
    "alone in a Compose": lambda env, kl: TransformedEnv(env, Compose(kl)),
    "first, nested": lambda env, kl: TransformedEnv(env, Compose(Compose(kl), StepCounter())),
    "second, nested": lambda env, kl: TransformedEnv(
        env, Compose(StepCounter(), Compose(RewardSum(), kl))
    ),
    "thrice nested": lambda env, kl: TransformedEnv(env, Compose(Compose(Compose(kl)))),
    "followed by append_transform": appended,
    "after insert_transform": inserted,
    "appended": lambda env, kl: TransformedEnv(env).append_transform(kl),
    "in an environment inside another": lambda env, kl: TransformedEnv(
        TransformedEnv(env, kl), StepCounter(), auto_unwrap=False
    ),
    "unwrapped": lambda env, kl: TransformedEnv(
        TransformedEnv(env, kl), StepCounter(), auto_unwrap=True
    ),
}


def coefficient(kl: nn.Module) -> torch.Tensor:
    return kl.computation.coeff if isinstance(kl, RetrieveKL) else kl.coef


def check(batch, actor: nn.Module, reference: nn.Module, coef: float) -> None:
    ratio = actor.log_prob(batch.copy()) - reference.log_prob(batch.copy())
    after = batch["next"]
    torch.testing.assert_close(after["kl"].squeeze(-1), ratio, atol=1e-5, rtol=1e-4)
    charged = after["raw"] - coef * ratio.unsqueeze(-1)
    torch.testing.assert_close(after["reward"], charged, atol=1e-5, rtol=1e-4)
    assert ratio.abs().mean() > 0.01


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "place", "cloned"),
    [
        *((KINDS[i % 3], place, False) for i, place in enumerate(PLACES)),
        *((kind, "second, nested", True) for kind in KINDS),
        ("legacy", "unwrapped", True),
    ],
)
def test_every_place_charges_by_the_coefficient_that_the_user_holds(kind, place, cloned) -> None:
    env, actor, reference, _ = case("pendulum")
    kl = held(kind, actor, reference)
    if cloned:
        kl = kl.clone()
        assert type(kl) is type(held(kind, actor, reference))
    around = PLACES[place](env, kl)
    check_env_specs(around)
    with torch.no_grad():
        check(around.rollout(5, actor, break_when_any_done=False), actor, reference, COEF)
        coefficient(kl).fill_(1.5)
        check(around.rollout(5, actor, break_when_any_done=False), actor, reference, 1.5)
    if kind == "retrieve":
        assert kl.coeff == 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_replay_buffer(kind: str) -> None:
    env, actor, reference, _ = case("pendulum")
    with torch.no_grad():
        batch = env.rollout(16, actor, break_when_any_done=False).reshape(-1)
    kl = held(kind, actor, reference)
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8, transform=kl)
    buffer.append_transform(lambda batch: batch.set("seen", batch["next", "reward"].clone()))
    buffer.extend(batch)
    sample = buffer.sample()
    check(sample, actor, reference, COEF)
    torch.testing.assert_close(sample["seen"], sample["next", "reward"])
    coefficient(kl).fill_(0.0)
    sample = buffer.sample()
    torch.testing.assert_close(sample["next", "reward"], sample["next", "raw"])
    charged = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8, transform=kl)
    charged.extend(kl(batch.clone()))
    with pytest.raises(RuntimeError, match="already"):
        charged.sample()


def test_torchrl_still_loses_the_place_of_a_nested_transform() -> None:
    """When this fails, :class:`klrl.envs.transforms.base.InPlace` may go."""
    inner = RewardSum()
    around = TransformedEnv(case("pendulum")[0], Compose(Compose(inner)))
    assert around.transform[0][0] is inner
    with pytest.raises(IndexError):
        _ = inner.parent


# FrameSkipTransform repeats the steps inside it. One action was drawn, so its KL is charged once:
# around it; inside it is refused.


SKIP = 4


INSIDE = {
    "around": lambda env, kl: TransformedEnv(
        TransformedEnv(env, kl), FrameSkipTransform(SKIP), auto_unwrap=True
    ),
    "behind": lambda env, kl: TransformedEnv(env, Compose(kl, FrameSkipTransform(SKIP))),
    "nested": lambda env, kl: TransformedEnv(env, Compose(Compose(kl), FrameSkipTransform(SKIP))),
    "appended": lambda env, kl: TransformedEnv(env, kl).append_transform(FrameSkipTransform(SKIP)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", INSIDE)
def test_a_kl_inside_is_refused(form: str, kind: str) -> None:
    env, policy, reference, _ = case("pendulum")
    with pytest.raises(RuntimeError, match="KL of one action would be charged 4 times; put"):
        INSIDE[form](env, held(kind, policy, reference)).rollout(2, policy)


@pytest.mark.parametrize("kind", KINDS)
def test_around_it_the_kl_is_charged_once_and_one_that_skips_nothing_is_let_pass(kind: str) -> None:
    for place in (
        lambda kl: (FrameSkipTransform(SKIP), kl),
        lambda kl: (kl, FrameSkipTransform(1)),
    ):
        env, policy, reference, _ = case("pendulum")
        around = TransformedEnv(env, Compose(*place(held(kind, policy, reference))))
        after = around.rollout(2, policy)["next"]
        assert after["kl"].abs().min() > 1e-3
        torch.testing.assert_close(after["reward"], after["raw"] - COEF * after["kl"])
