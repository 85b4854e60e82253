"""One case per documented argument and error of the control side: KLRewardTransform, its announced
successors. The losses' are in tests/losses/test_documented.py.

Elsewhere: the documented Pendulum example, every out key in the specs and random actions
(test_transforms); composed, nested and replayed data (test_control_family). Here every argument is
shown to be read, by numbers.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import (
    IndependentNormal,
)

from klrl.kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
    freeze,
)
from tests.transforms.toys import COUNT, actor, moved

# The control KLRewardTransform


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


@pytest.mark.parametrize("coef", [None, 0.25, 3, torch.tensor(0.5)])
def test_coef_is_subtracted_and_defaults_to_one(problem, coef) -> None:
    _, reference, batch, kl = problem
    transform = KLRewardTransform(reference) if coef is None else KLRewardTransform(reference, coef)
    expected = 2 - (1.0 if coef is None else float(coef)) * kl
    torch.testing.assert_close(transform(batch)["next", "reward"], expected)


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


def test_requires_grad_makes_differentiable_clones(problem) -> None:
    _, reference, batch, _ = problem
    for asked in (True, False):
        transform = KLRewardTransform(reference, requires_grad=asked)
        clones = list(transform.reference.parameters())
        assert [p.requires_grad for p in clones] == [asked] * len(clones)
        assert not {id(p) for p in clones} & {id(p) for p in reference.parameters()}
        assert transform(batch.clone())["next", "reward"].requires_grad is asked


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_reference_follows_casts(problem, requires_grad: bool) -> None:
    """Documented of requires_grad=True alone; klrl's follows in both cases."""
    _, reference, batch, kl = problem
    transform = KLRewardTransform(reference, requires_grad=requires_grad).to(torch.float64)
    assert {p.dtype for p in transform.reference.parameters()} == {torch.float64}
    reward = transform(batch.double())["next", "reward"].detach()
    torch.testing.assert_close(reward, 2 - kl.double(), atol=1e-5, rtol=1e-5)


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


class Buffered(nn.Module):
    """A buffer that asks for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        self.register_buffer("shift", torch.zeros(3, requires_grad=True))

    def forward(self, seen):
        return self.net(seen + self.shift)


def _with_buffer() -> ProbabilisticTensorDictSequential:
    module = TensorDictModule(Buffered(), ["observation"], ["loc", "scale"])
    return ProbabilisticTensorDictSequential(module, actor()[-1])


def _without_parameters() -> ProbabilisticTensorDictSequential:
    module = TensorDictModule(lambda x: (x, x.exp()), ["observation"], ["loc", "scale"])
    return ProbabilisticTensorDictSequential(module, actor()[-1])


def _without_log_prob() -> ProbabilisticTensorDictSequential:
    sampler = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=IndependentNormal
    )
    return ProbabilisticTensorDictSequential(actor()[0], sampler)


@pytest.mark.parametrize(
    ("make", "kwargs", "kind", "words"),
    [
        (actor, {"in_keys": ["a", "b"]}, ValueError, "in_keys=.*exactly one"),
        (actor, {"out_keys": ["a", "b"]}, ValueError, "out_keys=.*exactly one"),
        (actor, {"in_keys": []}, ValueError, "in_keys=.*exactly one"),
        (actor, {"in_keys": [1]}, ValueError, "in_keys=.*tuple of strings"),
        (actor, {"out_keys": [("a", 1)]}, ValueError, "out_keys=.*tuple of strings"),
        (lambda: nn.Linear(3, 1), {}, TypeError, "Linear: needs get_dist"),
        (_without_parameters, {}, ValueError, "no parameters to copy"),
        (_without_log_prob, {}, ValueError, "return_log_prob=True"),
        (_with_buffer, {}, ValueError, "shift.*requires gradients"),
    ],
)
def test_what_the_reward_transform_refuses(make, kwargs, kind, words) -> None:
    with pytest.raises(kind, match=words):
        KLRewardTransform(make(), **kwargs)


def test_what_a_batch_must_hold(problem) -> None:
    _, reference, batch, _ = problem
    with pytest.raises(KeyError, match="no 'next'"):
        KLRewardTransform(reference)(batch.exclude("next"))
    with pytest.raises(KeyError, match="score.*in_keys"):
        KLRewardTransform(reference, in_keys="score")(batch)
    with pytest.warns(UserWarning, match="random action has no KL"):
        after = KLRewardTransform(reference)(batch.exclude("action_log_prob"))["next"]
    assert after["reward"].isnan().all()


# The announced transforms


def test_the_announced_family_by_its_documented_roles(problem) -> None:
    """A frozen model scores the action; the KL; the reward; the three composed."""
    _, reference, batch, kl = problem
    scored = ReferenceModelLogProbTransform(frozen_model=reference)
    assert scored.in_keys == list(reference.in_keys)
    assert not any(p.requires_grad for p in scored.frozen_model.parameters())
    parts = (scored, KLDivergenceTransform(), RewardAdjustmentTransform(0.5))
    alone = batch.clone()
    for part in parts:
        part(alone)
    torch.testing.assert_close(alone["next", "reward"], 2 - 0.5 * kl)
    composed = KLConstrainedTransform(reference, 0.5)(batch)["next"]
    for key in ("ref_log_prob", "kl_penalty", "reward"):
        torch.testing.assert_close(composed[key], alone["next", key], atol=0, rtol=0)
