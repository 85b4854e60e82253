"""A policy with one action has log-prob 0 and KL 0, also where its parameters are 0."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor

from tests.transforms.heads import composite
from tests.transforms.toys import charge

WAYS = ["legacy", *(f"constrained, {name}" for name in ("k1", "k2", "k3", "exact")), "retrieve"]


class Zeros(nn.Module):
    """Normalised logits, which are 0 for one action."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, actions)

    def forward(self, seen):
        return self.linear(seen).log_softmax(-1)


def policy(actions: int) -> ProbabilisticActor:
    module = TensorDictModule(Zeros(actions), ["observation"], ["logits"])
    return ProbabilisticActor(
        module, ["logits"], distribution_class=Categorical, return_log_prob=True
    )


def transition(actor: ProbabilisticActor) -> TensorDict:
    with torch.no_grad():
        data = actor(TensorDict({"observation": torch.randn(5, 3)}, [5]))
    return data.set("next", TensorDict({"reward": torch.ones(5, 1)}, [5]))


@pytest.mark.parametrize("way", WAYS)
def test_one_action_has_a_kl_of_zero(way: str) -> None:
    actor = policy(1)
    data = transition(actor)
    assert not data["logits"].any()
    after = charge(way, actor, actor)(data)["next"]
    assert torch.equal(after["kl"], torch.zeros(5, 1))
    assert torch.equal(after["reward"], torch.ones(5, 1))


def test_heads_with_one_action_each_have_a_kl_of_zero() -> None:
    class Both(Zeros):
        def forward(self, seen):
            logits = super().forward(seen)
            return logits, logits.clone()

    actor = composite(Both(1), dict.fromkeys(("left", "right"), Categorical))
    after = charge("legacy", actor, actor)(transition(actor))["next"]
    assert torch.equal(after["kl"], torch.zeros(5, 1))
