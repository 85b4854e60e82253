"""``kl=legacy`` and ``kl=retrieve`` against arithmetic on torch distributions."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import ProbabilisticActor, TanhNormal

from klrl.config import EnvConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.control.run.kl import AnnotatedReference, annotate, make_reference_kl, measure
from klrl.control.run.rollout import add_policy
from klrl.kl import (
    KLRewardTransform,
    estimate_kl,
    freeze,
)
from tests.agents import agent_of, apart, gym, make_env, moved
from tests.transforms.toys import COUNT, actor

COEF = 0.5
ENVS = [("Pendulum-v1", "normal"), ("Pendulum-v1", "tanh_normal"), ("CartPole-v1", "mlp")]
UNCOLLECTED = "ignore:no action_log_prob for some actions:UserWarning"


def kl_config(mode: str, apply: str = "rollout", estimator: str = "k1"):
    if mode == "legacy":
        return LegacyKLConfig(coef=COEF, apply=apply, name="legacy")
    return RetrieveKLConfig(
        coef=COEF, apply=apply, estimator=estimator, allow_biased=True, name="retrieve"
    )


def moved_agent(env_id: str, distribution: str):
    """A policy, a reference that it has moved away from, and their environment's settings."""
    config = gym(env_id, 3)
    agent = agent_of(make_env(config, seed=0), distribution)
    _, reference = apart(agent.actor)
    agent.normalizer.update(torch.randn(500, agent.normalizer.mean.numel()))
    return agent, reference, config


def rollout(config: EnvConfig, actor: nn.Module, *transforms: nn.Module):
    torch.manual_seed(1)
    env = make_env(config, seed=5, transforms=transforms)
    return env.rollout(40, actor, break_when_any_done=False)


@pytest.mark.parametrize(("env_id", "distribution"), ENVS)
@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
def test_the_reward_is_charged_by_the_documented_formula(mode, env_id, distribution) -> None:
    """reward - coef * (log pi - log pi_ref), with pi_ref's parameters put into torch's classes."""
    agent, reference, config = moved_agent(env_id, distribution)
    batch = rollout(config, agent.actor)
    raw = batch["next", "reward"].clone()
    make_reference_kl(kl_config(mode), agent.actor, reference).transform(batch)
    ref = reference.get_dist_params(batch.select("observation"))
    params = {key: ref[key] for key in agent.family.param_keys}
    dist = agent.family.distribution(**params)
    log_ratio = (batch["action_log_prob"] - dist.log_prob(batch["action"])).unsqueeze(-1)
    after = batch["next"]
    torch.testing.assert_close(after["reward"], raw - COEF * log_ratio, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(after["kl_penalty"], log_ratio, atol=4e-4, rtol=1e-4)
    torch.testing.assert_close(after["reward_raw"], raw)
    assert log_ratio.abs().mean() > 0.01
    with pytest.raises(RuntimeError, match="already"):
        make_reference_kl(kl_config(mode), agent.actor, reference).transform(batch)


@pytest.mark.filterwarnings(UNCOLLECTED)
@pytest.mark.parametrize(
    ("mode", "env_id", "distribution"),
    [("legacy", *ENVS[0]), ("legacy", *ENVS[2]), ("retrieve", *ENVS[1])],
)
def test_at_every_step_or_once_per_rollout_is_the_same(mode, env_id, distribution) -> None:
    agent, reference, config = moved_agent(env_id, distribution)
    online = make_reference_kl(kl_config(mode, "step"), agent.actor, reference)
    env = make_env(config, seed=0, transforms=(online.transform,))
    check_env_specs(env)
    assert float(env.reset()["kl_penalty"].abs().sum()) == 0.0
    online = make_reference_kl(kl_config(mode, "step"), agent.actor, reference)
    stepped = rollout(config, agent.actor, online.transform)
    batch = rollout(config, agent.actor)
    make_reference_kl(kl_config(mode), agent.actor, reference).transform(batch)
    for key in ("reward", "reward_raw", "kl_penalty", "ref_log_prob", "episode_reward"):
        torch.testing.assert_close(stepped["next", key], batch["next", key], atol=1e-6, rtol=1e-6)


def test_measured_kls_are_those_of_torchs_distributions() -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "tanh_normal")
    batch = rollout(config, agent.actor)
    annotate(batch, reference, agent)
    measured = measure(batch, agent)
    ref = reference.get_dist_params(batch.select("observation"))
    dists = [torch.distributions.Normal(x["loc"], x["scale"]) for x in (batch, ref)]
    exact = torch.distributions.kl_divergence(*dists).mean()
    torch.testing.assert_close(measured["kl/ref/exact"], exact, atol=1e-5, rtol=1e-5)
    log_ratio = (
        dists[0].log_prob(batch["pre_tanh"]) - dists[1].log_prob(batch["pre_tanh"])
    ).squeeze(-1)
    for name in ("k1", "k2", "k3"):
        by_hand = estimate_kl(log_ratio, torch.zeros_like(log_ratio), name).mean()
        torch.testing.assert_close(measured[f"kl/ref/{name}"], by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("env_id", "distribution"), ENVS)
def test_an_annotated_batch_needs_no_further_forward(env_id, distribution) -> None:
    """The log-prob of an annotated rollout is that of one that its transform scores, to the bit."""
    agent, reference, config = moved_agent(env_id, distribution)
    scored = rollout(config, agent.actor).detach()
    with torch.no_grad():
        add_policy(agent, scored)
    batch = scored.clone()
    kl = make_reference_kl(kl_config("retrieve"), agent.actor, AnnotatedReference(reference))
    annotate(batch, reference, agent)
    with monitored(agent.policy_net) as forwards:
        kl.transform(batch)
        assert not forwards
    kl = make_reference_kl(kl_config("retrieve"), agent.actor, reference)
    with monitored(agent.policy_net) as forwards:
        kl.transform(scored)
        assert len(forwards) == 1
    assert torch.equal(batch["next", "log_prob"], scored["next", "log_prob"])
    torch.testing.assert_close(batch["next", "reward"], scored["next", "reward"])


@contextmanager
def monitored(net: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the list of a network's calls."""
    calls: list[nn.Module] = []
    handle = net.register_forward_hook(lambda module, *_: calls.append(module))
    yield calls
    handle.remove()


def documented_actor() -> tuple[GymEnv, ProbabilisticActor]:
    base = GymEnv("Pendulum-v1")
    sizes = base.observation_spec["observation"].shape[-1], base.action_spec.shape[-1]
    network = nn.Sequential(nn.Linear(sizes[0], sizes[1] * 2), NormalParamExtractor())
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )
    return base, actor


@pytest.mark.filterwarnings(UNCOLLECTED)
@pytest.mark.parametrize("out_key", ["reward", "reward_kl", ("agent", "reward_kl")])
def test_legacy_specs_for_every_out_key(out_key) -> None:
    base, actor = documented_actor()
    env = TransformedEnv(base, KLRewardTransform(actor, in_keys=["reward"], out_keys=[out_key]))
    check_env_specs(env)  # raises where a spec and a rollout differ
    assert env.rollout(2, actor)["next"].get(out_key).shape == (2, 1)


# One case per documented argument of the control side's KLRewardTransform, shown to be read. Its
# coefficient: tests/kl/test_coefficient.py; random actions: test_sampled.


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
