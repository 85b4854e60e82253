"""One case per documented argument of the control side's KLRewardTransform, shown to be read.

The losses' are in tests/losses/test_documented.py. Elsewhere: the documented Pendulum example and
every out key in the specs (test_transforms), random actions (test_sampled), the coefficient
(tests/kl/test_coefficient.py), its announced successors (test_control_family).
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from klrl.kl import (
    KLRewardTransform,
    freeze,
)
from tests.agents import moved
from tests.transforms.toys import COUNT, actor


def transition(policy: nn.Module, **rewards: float) -> TensorDict:
    """Sampled by a policy; rewards are constants."""
    batch = TensorDict({"observation": torch.randn(COUNT, 3)}, [COUNT])
    with torch.no_grad():
        policy(batch)
    told = {
        key: torch.full((COUNT, 1), value) for key, value in (rewards or {"reward": 2.0}).items()
    }
    return batch.set("next", TensorDict(told, [COUNT]))


def k1(policy: nn.Module, reference: nn.Module, batch: TensorDict) -> torch.Tensor:
    """By torch's own classes, [N, 1]."""
    seen, action = batch.select("observation"), batch["action"]
    dists = (model.get_dist(seen.copy()) for model in (policy, reference))
    log_p, log_q = (
        torch.distributions.Normal(d.base_dist.loc, d.base_dist.scale).log_prob(action).sum(-1)
        for d in dists
    )
    return (log_p - log_q).unsqueeze(-1).detach()


@pytest.fixture
def problem():
    """(the policy, its reference before it moved, a transition, its k1)."""
    reference = actor()
    policy = moved(freeze(reference))
    batch = transition(policy)
    kl = k1(policy, reference, batch)
    assert kl.abs().mean() > 0.05
    return policy, reference, batch, kl


def test_the_actor_is_frozen_as_it_is_now(problem) -> None:
    _, reference, batch, kl = problem
    transform = KLRewardTransform(reference)
    moved(reference)
    torch.testing.assert_close(transform(batch)["next", "reward"], 2 - kl)


@pytest.mark.parametrize(
    ("in_keys", "out_keys", "read", "written"),
    [
        (None, None, "reward", "reward"),
        (None, "reward_kl", "reward", "reward_kl"),
        ("score", None, "score", "score"),
        (["score"], ["reward_kl"], "score", "reward_kl"),
        (("team", "score"), ("team", "charged"), ("team", "score"), ("team", "charged")),
        ([("team", "score")], None, ("team", "score"), ("team", "score")),
    ],
)
def test_in_and_out_keys(problem, in_keys, out_keys, read, written) -> None:
    _, reference, batch, kl = problem
    rewards = {"reward": 2.0, "score": 5.0, ("team", "score"): 7.0}
    for key, value in rewards.items():
        batch["next"].set(key, torch.full((COUNT, 1), value))
    after = KLRewardTransform(reference, 0.5, in_keys, out_keys)(batch)["next"]
    torch.testing.assert_close(after.get(written), rewards[read] - 0.5 * kl)
    for key, value in rewards.items():
        if key != written:
            assert (after.get(key) == value).all()


def test_the_log_prob_key_is_the_actors() -> None:
    reference = actor(log_prob_key="lp")
    policy = moved(freeze(reference))
    batch = transition(policy)
    assert "action_log_prob" not in batch.keys()
    kl = k1(policy, reference, batch)
    torch.testing.assert_close(KLRewardTransform(reference)(batch)["next", "reward"], 2 - kl)


def test_the_action_key(problem) -> None:
    _, reference, batch, _ = problem
    batch["other"] = torch.zeros(COUNT, 2)
    out = KLRewardTransform(reference, action_key="other", ref_log_prob_key="lq")(batch)["next"]
    dist = reference.get_dist(batch.select("observation"))
    torch.testing.assert_close(out["lq"], dist.log_prob(batch["other"]).detach())


def test_clones_are_differentiable_where_asked_and_follow_casts(problem) -> None:
    """Documented of requires_grad=True alone; klrl's follows in both cases."""
    _, reference, batch, kl = problem
    for asked in (True, False):
        transform = KLRewardTransform(reference, requires_grad=asked).to(torch.float64)
        clones = list(transform.reference.parameters())
        assert {(p.requires_grad, p.dtype) for p in clones} == {(asked, torch.float64)}
        assert not {id(p) for p in clones} & {id(p) for p in reference.parameters()}
        reward = transform(batch.clone().double())["next", "reward"]
        torch.testing.assert_close(reward.detach(), 2 - kl.double(), atol=1e-5, rtol=1e-5)
        assert reward.requires_grad is asked
        if asked:
            reward.sum().backward()
            assert all(p.grad.any() for p in clones)
