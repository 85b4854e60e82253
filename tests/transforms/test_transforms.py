"""``kl=legacy`` and ``kl=retrieve`` against arithmetic on torch distributions."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import Compose, TransformedEnv, check_env_specs
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import ProbabilisticActor, TanhNormal

from klrl.config import EnvConfig, GaussianActorConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.control.actor import make_agent
from klrl.control.env import make_env
from klrl.control.kl import annotate, make_reference_kl, measure
from klrl.kl import KLComputation, KLRewardTransform, RetrieveLogProb, estimate_kl, freeze

COEF = 0.5
ENVS = [("Pendulum-v1", "normal"), ("Pendulum-v1", "tanh_normal"), ("CartPole-v1", "mlp")]
UNCOLLECTED = "ignore:no action_log_prob in the data:UserWarning"


def kl_config(mode: str, apply: str = "rollout", estimator: str = "k1"):
    if mode == "legacy":
        return LegacyKLConfig(COEF, apply, name="legacy")
    return RetrieveKLConfig(COEF, apply, estimator, "reward", True, name="retrieve")


def moved_agent(env_id: str, distribution: str):
    """A policy, a reference that it has moved away from, and their environment's settings."""
    config = EnvConfig(env_id, {}, 3, True, 1.0, name="gym")
    actor = GaussianActorConfig([8], "tanh", False, init_std=1.0, name=distribution)
    agent = make_agent(actor, make_env(config, seed=0), normalize=True, separate=False)
    reference = freeze(agent.actor)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
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


@pytest.mark.parametrize(("env_id", "distribution"), ENVS)
@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
def test_at_every_step_or_once_per_rollout_is_the_same(mode, env_id, distribution) -> None:
    agent, reference, config = moved_agent(env_id, distribution)
    online = make_reference_kl(kl_config(mode, "step"), agent.actor, reference)
    stepped = rollout(config, agent.actor, online.transform)
    batch = rollout(config, agent.actor)
    make_reference_kl(kl_config(mode), agent.actor, reference).transform(batch)
    for key in ("reward", "reward_raw", "kl_penalty", "ref_log_prob", "episode_reward"):
        torch.testing.assert_close(stepped["next", key], batch["next", key], atol=1e-6, rtol=1e-6)


def test_legacy_and_retrieve_agree() -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "normal")
    batches = [rollout(config, agent.actor) for _ in range(2)]
    for batch, mode in zip(batches, ("legacy", "retrieve"), strict=True):
        make_reference_kl(kl_config(mode), agent.actor, reference).transform(batch)
    for key in ("reward", "kl_penalty", "ref_log_prob"):
        torch.testing.assert_close(
            batches[0]["next", key], batches[1]["next", key], atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_chosen_estimator_is_the_one_that_is_charged(estimator: str) -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "normal")
    batch = rollout(config, agent.actor)
    make_reference_kl(kl_config("retrieve", estimator=estimator), agent.actor, reference).transform(
        batch
    )
    log_ratio = batch["action_log_prob"] - batch["next", "ref_log_prob"]
    by_hand = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": (-log_ratio).exp() - 1 + log_ratio,
    }[estimator]
    charged = (batch["next", "reward_raw"] - batch["next", "reward"]).squeeze(-1) / COEF
    torch.testing.assert_close(charged, by_hand, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
def test_a_second_charge_is_refused(mode: str) -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "normal")
    batch = rollout(config, agent.actor)
    transform = make_reference_kl(kl_config(mode), agent.actor, reference).transform
    transform(batch)
    with pytest.raises(RuntimeError, match="already"):
        transform(batch)


@pytest.mark.filterwarnings(UNCOLLECTED)
@pytest.mark.parametrize(("env_id", "distribution"), ENVS)
@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
def test_specs_hold_in_an_environment(mode, env_id, distribution) -> None:
    agent, reference, config = moved_agent(env_id, distribution)
    kl = make_reference_kl(kl_config(mode, "step"), agent.actor, reference)
    env = make_env(config, seed=0, transforms=(kl.transform,))
    check_env_specs(env)
    assert float(env.reset()["kl_penalty"].abs().sum()) == 0.0


@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
def test_the_reference_does_not_follow_the_policy(mode: str) -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "normal")
    kl = make_reference_kl(kl_config(mode), agent.actor, reference)
    batch = rollout(config, agent.actor)
    scores = []
    for shift in (0.0, 0.5):
        with torch.no_grad():
            for parameter in agent.actor.parameters():
                parameter.add_(shift)
        copied = copy.deepcopy(batch)
        scores.append(kl.transform(copied)["next", "ref_log_prob"])
    torch.testing.assert_close(scores[0], scores[1], atol=0, rtol=0)


def test_the_coefficient_can_be_moved() -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "normal")
    for mode in ("legacy", "retrieve"):
        kl = make_reference_kl(kl_config(mode), agent.actor, reference)
        kl.to(torch.float32)  # replaces the buffer, as a move to another device does
        kl.coef = 0.0
        batch = rollout(config, agent.actor)
        kl.transform(batch)
        torch.testing.assert_close(batch["next", "reward"], batch["next", "reward_raw"])
        assert batch["next", "kl_penalty"].abs().mean() > 0.01


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


def test_a_random_action_is_not_charged_in_silence() -> None:
    base, actor = documented_actor()
    env = TransformedEnv(base, KLRewardTransform(actor))
    with pytest.warns(UserWarning, match="random action has no KL"):
        assert env.rollout(2)["next", "reward"].isnan().all()


def test_legacy_gradients_only_where_asked() -> None:
    _, actor = documented_actor()
    assert not any(p.requires_grad for p in KLRewardTransform(actor).reference.parameters())
    transform = KLRewardTransform(actor, requires_grad=True)
    batch = actor(TensorDict({"observation": torch.randn(4, 3)}, [4])).detach()
    batch["next"] = TensorDict({"reward": torch.zeros(4, 1)}, [4])
    transform(batch)["next", "reward"].sum().backward()
    assert all(p.grad is not None for p in transform.reference.parameters())


def test_wrong_arguments_are_named() -> None:
    _, actor = documented_actor()
    with pytest.raises(ValueError, match="in_keys"):
        KLRewardTransform(actor, in_keys=["a", "b"])
    with pytest.raises(ValueError, match="out_keys"):
        KLRewardTransform(actor, out_keys=["a", "b"])
    with pytest.raises(TypeError, match="get_dist"):
        KLRewardTransform(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="two keys"):
        KLComputation("a", "a")
    with pytest.raises(ValueError, match="k7"):
        KLComputation(estimator="k7")
    with pytest.raises(TypeError, match="log_prob"):
        RetrieveLogProb(nn.Linear(1, 1))
    with pytest.raises(KeyError, match="no 'next'"):
        RetrieveLogProb(actor)(TensorDict({"observation": torch.zeros(2, 3)}, [2]))
    with pytest.raises(KeyError, match="RetrieveLogProb before"):
        KLComputation()(TensorDict({"next": {"reward": torch.zeros(2, 1)}}, [2]))


def test_log_probs_are_found_below_next_then_at_the_root() -> None:
    batch = TensorDict({"p": torch.tensor([-1.0]), "next": {"reward": torch.ones(1, 1)}}, [1])
    batch["next", "q"] = torch.tensor([-3.0])
    batch["q"] = torch.tensor([99.0])
    KLComputation("p", "q", coeff=0.25)(batch)
    assert float(batch["next", "kl_penalty"]) == 2.0
    assert float(batch["next", "reward"]) == 1.0 - 0.25 * 2.0


def test_retrieved_log_probs_carry_gradients_only_where_asked() -> None:
    _, actor = documented_actor()
    batch = actor(TensorDict({"observation": torch.randn(4, 3)}, [4])).detach()
    batch["next"] = TensorDict({"reward": torch.zeros(4, 1)}, [4])
    for detach in (True, False):
        written = RetrieveLogProb(actor, detach=detach)(batch.clone())["next", "log_probs", "full"]
        assert written.requires_grad is not detach


def test_parts_compose_as_in_the_runner() -> None:
    agent, reference, config = moved_agent("Pendulum-v1", "normal")
    parts = Compose(
        RetrieveLogProb(agent.actor),
        RetrieveLogProb(reference, log_probs_full_key=("ref_log_probs", "full")),
        KLComputation(coeff=COEF),
    )
    batch, other = rollout(config, agent.actor), rollout(config, agent.actor)
    parts(batch)
    make_reference_kl(kl_config("retrieve"), agent.actor, reference).transform(other)
    torch.testing.assert_close(batch["next", "reward"], other["next", "reward"])
