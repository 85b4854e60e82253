"""``kl=legacy`` and ``kl=retrieve`` against arithmetic on torch distributions."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import ProbabilisticActor, TanhNormal

from klrl.config import EnvConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.control.env import make_env
from klrl.control.kl import annotate, make_reference_kl, measure
from klrl.kl import KLRewardTransform, RetrieveLogProb, estimate_kl
from tests.agents import agent_of, apart, gym

COEF = 0.5
ENVS = [("Pendulum-v1", "normal"), ("Pendulum-v1", "tanh_normal"), ("CartPole-v1", "mlp")]
UNCOLLECTED = "ignore:no action_log_prob in the data:UserWarning"


def kl_config(mode: str, apply: str = "rollout", estimator: str = "k1"):
    if mode == "legacy":
        return LegacyKLConfig(COEF, apply, name="legacy")
    return RetrieveKLConfig(COEF, apply, estimator, "reward", True, name="retrieve")


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
@pytest.mark.parametrize(("env_id", "distribution"), ENVS)
@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
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
    annotate(batch, reference, agent.family)
    measured = measure(batch, agent.family)
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


def documented_actor() -> tuple[GymEnv, ProbabilisticActor]:
    base = GymEnv("Pendulum-v1")
    sizes = base.observation_spec["observation"].shape[-1], base.action_spec.shape[-1]
    network = nn.Sequential(nn.Linear(sizes[0], sizes[1] * 2), NormalParamExtractor())
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )
    return base, actor


def test_the_documented_pendulum_example_runs() -> None:
    """The example of KLRewardTransform's documentation, import apart."""
    base, actor = documented_actor()
    transform = KLRewardTransform(actor, out_keys="reward_kl")
    env = TransformedEnv(base, transform)
    with torch.no_grad():
        _ = TensorDict(dict(actor.named_parameters()), []).apply_(
            lambda x: x.data.copy_(x.data + 1)
        )
        td = env.rollout(3, actor)
    assert (td.get(("next", "reward")) != td.get(("next", "reward_kl"))).all()
    kl = td["next", "reward"] - td["next", "reward_kl"]
    dist = transform.reference.get_dist(td.select("observation"))
    by_hand = td["action_log_prob"] - dist.log_prob(td["action"])
    torch.testing.assert_close(kl.squeeze(-1), by_hand, atol=1e-4, rtol=1e-4)
    assert float(env.reset()["reward_kl"].abs().sum()) == 0.0


@pytest.mark.filterwarnings(UNCOLLECTED)
@pytest.mark.parametrize("out_key", ["reward", "reward_kl", ("agent", "reward_kl")])
def test_legacy_specs_for_every_out_key(out_key) -> None:
    base, actor = documented_actor()
    env = TransformedEnv(base, KLRewardTransform(actor, in_keys=["reward"], out_keys=[out_key]))
    check_env_specs(env)  # raises where a spec and a rollout differ
    assert env.rollout(2, actor)["next"].get(out_key).shape == (2, 1)


def test_retrieved_log_probs_carry_gradients_only_where_asked() -> None:
    _, actor = documented_actor()
    batch = actor(TensorDict({"observation": torch.randn(4, 3)}, [4])).detach()
    batch["next"] = TensorDict({"reward": torch.zeros(4, 1)}, [4])
    for detach in (True, False):
        written = RetrieveLogProb(actor, detach=detach)(batch.clone())["next", "log_probs", "full"]
        assert written.requires_grad is not detach
