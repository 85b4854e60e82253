"""TorchRL's FrameSkipTransform repeats the steps inside it: a KL that is charged there is refused.

One action was drawn, so its KL is charged once: around the FrameSkipTransform.
"""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import Compose, FrameSkipTransform, SerialEnv, TransformedEnv

from klrl.kl import SendToWorkers
from tests.transforms.test_control_family import case
from tests.transforms.test_places import KINDS, held
from tests.transforms.toys import COEF

SKIP = 4


def in_a_worker(env, kl, policy):
    inner = TransformedEnv(env, Compose(SendToWorkers(policy), kl))
    return TransformedEnv(SerialEnv(1, lambda: inner), FrameSkipTransform(SKIP))


INSIDE = {
    "around": lambda env, kl, _: TransformedEnv(
        TransformedEnv(env, kl), FrameSkipTransform(SKIP), auto_unwrap=True
    ),
    "apart": lambda env, kl, _: TransformedEnv(
        TransformedEnv(env, kl), FrameSkipTransform(SKIP), auto_unwrap=False
    ),
    "behind": lambda env, kl, _: TransformedEnv(env, Compose(kl, FrameSkipTransform(SKIP))),
    "in a worker": in_a_worker,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", INSIDE)
def test_a_kl_inside_is_refused(form: str, kind: str) -> None:
    env, policy, reference, _ = case("pendulum")
    around = INSIDE[form](env, held(kind, policy, reference), policy)
    with pytest.raises(RuntimeError, match="KL of one action would be charged 4 times; put"):
        around.rollout(2, policy)


@pytest.mark.parametrize("kind", KINDS)
def test_around_it_the_kl_is_charged_once(kind: str) -> None:
    env, policy, reference, _ = case("pendulum")
    around = TransformedEnv(env, Compose(FrameSkipTransform(SKIP), held(kind, policy, reference)))
    after = around.rollout(2, policy)["next"]
    assert after["kl"].abs().min() > 1e-3
    torch.testing.assert_close(after["reward"], after["raw"] - COEF * after["kl"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_skips_nothing_is_let_pass(kind: str) -> None:
    env, policy, reference, _ = case("pendulum")
    around = TransformedEnv(env, Compose(held(kind, policy, reference), FrameSkipTransform(1)))
    after = around.rollout(2, policy)["next"]
    torch.testing.assert_close(after["reward"], after["raw"] - COEF * after["kl"])
