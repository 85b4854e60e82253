"""Every control transform alone, composed, nested, batched, replayed, pickled and in workers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, ParallelEnv, SerialEnv, TransformedEnv, check_env_specs

from klrl.config import EnvConfig, GaussianActorConfig
from klrl.control.actor import make_agent
from klrl.control.copies import VectorGymEnv
from klrl.control.env import make_env
from klrl.kl import (
    KLComputation,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RetrieveLogProb,
    RewardAdjustmentTransform,
    exact_kl,
    freeze,
)
from tests.transforms.heads import TwoHeads, two_headed_actor

COEF = 0.4
pytestmark = pytest.mark.filterwarnings("ignore:no .*log_prob.* in the data:UserWarning")


def moved(actor: nn.Module, by: float = 0.3) -> tuple[nn.Module, nn.Module]:
    """(a policy, the reference that it moved away from)."""
    reference = freeze(actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return actor, reference


def case(name: str):
    """An environment, a policy, its reference and the key of the reward."""
    torch.manual_seed(0)
    if name == "two heads":
        return TwoHeads(), *moved(two_headed_actor()), ("agent", "reward")
    env = VectorGymEnv({"pendulum": "Pendulum-v1", "cartpole": "CartPole-v1"}[name], 2, seed=0)
    config = GaussianActorConfig([8], "tanh", False, init_std=1.0, name="mlp")
    agent = make_agent(config, env, normalize=True, separate=False)
    return env, *moved(agent.actor), "reward"


def transforms(reference: nn.Module, actor: nn.Module, reward: object) -> dict[str, nn.Module]:
    keys = {"in_keys": [reward]}
    return {
        "legacy": KLRewardTransform(reference, COEF, **keys, kl_key="kl"),
        "constrained": KLConstrainedTransform(reference, COEF, **keys, kl_key="kl"),
        "constrained, exact": KLConstrainedTransform(
            reference, COEF, **keys, kl_key="kl", estimator="exact"
        ),
        "retrieve": Compose(
            RetrieveLogProb(actor, log_probs_full_key="log_prob"),
            RetrieveLogProb(reference, log_probs_full_key="ref_log_prob"),
            KLComputation("log_prob", "ref_log_prob", coeff=COEF, kl_key="kl", reward_key=reward),
        ),
        "log-prob alone": ReferenceModelLogProbTransform(reference),
    }


NAMES = ("legacy", "constrained", "constrained, exact", "retrieve", "log-prob alone")
CASES = ("pendulum", "cartpole", "two heads")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", CASES)
def test_specs_hold_and_a_collector_delivers(name: str, where: str) -> None:
    env, actor, reference, reward = case(where)
    transform = transforms(reference, actor, reward)[name]
    transformed = TransformedEnv(env, transform)
    check_env_specs(transformed)
    collector = Collector(
        transformed,
        actor,
        frames_per_batch=24,
        total_frames=48,
        auto_register_policy_transforms=False,
    )
    for batch in collector:
        after = batch["next"]
        assert after.get(reward).isfinite().all()
        written = "ref_log_prob" if name == "log-prob alone" else "kl"
        assert after[written].isfinite().all()
        assert after[written].abs().sum() > 0
    collector.shutdown()


@pytest.mark.parametrize("where", CASES)
def test_all_of_them_charge_the_same(where: str) -> None:
    """k1 three ways, and exact against torch's closed forms, on one rollout."""
    env, actor, reference, reward = case(where)
    with torch.no_grad():
        batch = env.rollout(12, actor, break_when_any_done=False)
    raw = batch["next"].get(reward).clone()
    after = {n: t(batch.clone())["next"] for n, t in transforms(reference, actor, reward).items()}
    for name in ("constrained", "retrieve"):
        torch.testing.assert_close(after[name]["kl"], after["legacy"]["kl"], atol=1e-5, rtol=1e-4)
        charged = after[name].get(reward)
        torch.testing.assert_close(charged, raw - COEF * after[name]["kl"], atol=1e-6, rtol=1e-5)
    dist, ref_dist = (m.get_dist(batch.copy()) for m in (actor, reference))
    exact = exact_kl(dist, ref_dist).unsqueeze(-1)
    torch.testing.assert_close(after["constrained, exact"]["kl"], exact, atol=1e-5, rtol=1e-4)
    charged = after["constrained, exact"].get(reward)
    torch.testing.assert_close(charged, raw - COEF * exact, atol=1e-5, rtol=1e-4)


def test_heads_add() -> None:
    env, actor, reference, _ = case("two heads")
    with torch.no_grad():
        batch = env.rollout(8, actor)
    after = ReferenceModelLogProbTransform(reference)(batch.clone())["next"]
    dist = reference.get_dist(batch.copy())
    by_hand = sum(
        head.log_prob(batch["agent", key])
        for key, head in zip(("move", "press"), dist.dists.values(), strict=True)
    )
    torch.testing.assert_close(after["ref_log_prob"], by_hand)


def test_the_action_is_scored_never_resampled() -> None:
    env, actor, reference, _ = case("pendulum")
    batch = env.rollout(6, actor).detach()
    before = batch.clone()
    ReferenceModelLogProbTransform(reference)(batch)
    for key in before.keys(True, True):
        torch.testing.assert_close(batch[key], before[key], atol=0, rtol=0)


def test_each_part_is_usable_alone_and_says_what_it_misses() -> None:
    batch = TensorDict(
        {
            "action_log_prob": torch.tensor([-1.0, -2.0]),
            "next": {"ref_log_prob": torch.tensor([-1.5, -4.0]), "reward": torch.ones(2, 1)},
        },
        [2],
    )
    KLDivergenceTransform(estimator="k2")(batch)
    assert batch["next", "kl_penalty"].squeeze(-1).tolist() == [0.125, 2.0]
    RewardAdjustmentTransform(0.5, out_keys="reward_kl", raw_reward_key="reward_raw")(batch)
    assert batch["next", "reward_kl"].squeeze(-1).tolist() == [0.9375, 0.0]
    assert batch["next", "reward"].squeeze(-1).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="already"):
        RewardAdjustmentTransform(0.5, raw_reward_key="reward_raw")(batch)
    empty = TensorDict(
        {"action_log_prob": torch.zeros(2), "next": {"reward": torch.ones(2, 1)}}, [2]
    )
    with pytest.raises(KeyError, match="ReferenceModelLogProbTransform before"):
        KLDivergenceTransform()(empty)
    with pytest.raises(KeyError, match="KLDivergenceTransform before"):
        RewardAdjustmentTransform()(empty)
    with pytest.raises(KeyError, match="in_keys"):
        RewardAdjustmentTransform(in_keys="score")(empty)
    _, actor, reference, _ = case("pendulum")
    incomplete = actor(TensorDict({"observation": torch.zeros(2, 3)}, [2])).exclude("loc")
    incomplete["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
    with pytest.raises(KeyError, match="estimator=exact compares distributions"):
        KLDivergenceTransform(reference, estimator="exact")(incomplete)
    with pytest.raises(ValueError, match="needs the reference"):
        KLDivergenceTransform(estimator="exact")
    with pytest.raises(ValueError, match="k5"):
        KLDivergenceTransform(estimator="k5")
    with pytest.raises(ValueError, match="in_keys"):
        RewardAdjustmentTransform(in_keys=["a", "b"])
    with pytest.raises(TypeError, match="get_dist"):
        ReferenceModelLogProbTransform(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["legacy", "constrained"])
def test_a_replay_buffer_charges_each_sample_once(name: str) -> None:
    env, actor, reference, _ = case("pendulum")
    batch = env.rollout(16, actor, break_when_any_done=False).detach().reshape(-1)
    kind = {"legacy": KLRewardTransform, "constrained": KLConstrainedTransform}[name]
    transform = kind(reference, COEF, raw_reward_key="reward_raw")
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8)
    buffer.extend(batch)
    buffer.append_transform(transform)
    for _ in range(3):
        sample = buffer.sample()
        kl = sample["action_log_prob"] - reference.log_prob(sample.copy())
        expected = sample["next", "reward_raw"] - COEF * kl.unsqueeze(-1)
        torch.testing.assert_close(sample["next", "reward"], expected, atol=1e-5, rtol=1e-5)
    charged = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8)
    charged.extend(transform(batch.clone()))
    charged.append_transform(transform)
    with pytest.raises(RuntimeError, match="already"):
        charged.sample()


@pytest.mark.parametrize("name", NAMES[:4])
def test_float64_pickle_state_and_copies(name: str) -> None:
    env, actor, reference, reward = case("pendulum")
    batch = env.rollout(6, actor, break_when_any_done=False).detach()
    transform = transforms(reference, actor, reward)[name]
    expected = transform(batch.clone())["next", "kl"]
    again = pickle.loads(pickle.dumps(transform))
    torch.testing.assert_close(again(batch.clone())["next", "kl"], expected)
    other = transforms(moved(copy.deepcopy(reference), 2.0)[0], copy.deepcopy(actor), reward)[name]
    assert not torch.allclose(other(batch.clone())["next", "kl"], expected)
    other.load_state_dict(transform.state_dict())
    torch.testing.assert_close(other(batch.clone())["next", "kl"], expected)
    double = copy.deepcopy(transform).to(torch.float64)
    wide = batch.clone().double()
    assert double(wide)["next", "kl"].dtype == torch.float64
    torch.testing.assert_close(wide["next", "kl"].float(), expected, atol=1e-4, rtol=1e-3)


def plain_env() -> TransformedEnv:
    return make_env(EnvConfig("Pendulum-v1", {}, 1, True, 1.0, name="gym"), seed=3)


@pytest.mark.parametrize("kind", [SerialEnv, pytest.param(ParallelEnv, marks=pytest.mark.services)])
def test_around_batched_workers(kind) -> None:
    """Around them; inside them: test_workers."""
    _, actor, reference, _ = case("pendulum")
    transform = KLConstrainedTransform(reference, COEF, raw_reward_key="reward_raw")
    env = TransformedEnv(kind(2, plain_env), transform)
    try:
        batch = env.rollout(8, actor).detach()
    finally:
        env.close()
    assert batch.shape == (2, 1, 8)
    kl = batch["action_log_prob"] - reference.log_prob(batch.copy())
    torch.testing.assert_close(batch["next", "kl_penalty"].squeeze(-1), kl, atol=1e-5, rtol=1e-5)
    charged = batch["next", "reward_raw"] - COEF * batch["next", "kl_penalty"]
    torch.testing.assert_close(batch["next", "reward"], charged, atol=1e-5, rtol=1e-5)


def test_coefficients_move() -> None:
    env, actor, reference, _ = case("pendulum")
    transform = KLConstrainedTransform(reference, COEF, raw_reward_key="reward_raw")
    transform.coef.fill_(0.0)
    batch = transform(env.rollout(4, actor).detach())
    torch.testing.assert_close(batch["next", "reward"], batch["next", "reward_raw"])
