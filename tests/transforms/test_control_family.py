"""Every control transform alone, composed and batched. Copied, pickled, cast: test_frozen."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv, check_env_specs

from klrl.control.env.copies import VectorGymEnv
from klrl.kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
    exact_kl,
)
from tests.agents import agent_of, apart, gym, make_env
from tests.transforms.heads import TwoHeads, by_hand, two_headed_actor
from tests.transforms.toys import COEF, charge

pytestmark = pytest.mark.filterwarnings("ignore:no .*log_prob.* for some actions:UserWarning")


def case(name: str):
    """An environment, a policy, its reference and the key of the reward."""
    torch.manual_seed(0)
    if name == "two heads":
        return TwoHeads(), *apart(two_headed_actor()), ("agent", "reward")
    if name == "one key":
        policies = apart(two_headed_actor("action", one_key=True))
        return TwoHeads(below="action"), *policies, ("agent", "reward")
    env = VectorGymEnv({"pendulum": "Pendulum-v1", "cartpole": "CartPole-v1"}[name], 2, seed=0)
    return env, *apart(agent_of(env).actor), "reward"


WAYS = ("legacy", "constrained", "constrained, exact", "parts", "retrieve")
CASES = ("pendulum", "cartpole", "two heads", "one key")


@pytest.mark.parametrize(
    ("way", "where"),
    [
        *((way, where) for way in (*WAYS, "log-prob alone") for where in ("pendulum", "two heads")),
        *(("constrained, exact", where) for where in ("cartpole", "one key")),
    ],
)
def test_specs_hold_and_a_collector_delivers(way: str, where: str) -> None:
    env, actor, reference, reward = case(where)
    scoring = way == "log-prob alone"
    transformed = TransformedEnv(
        env,
        ReferenceModelLogProbTransform(reference)
        if scoring
        else charge(way, actor, reference, reward),
    )
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
        written = "ref_log_prob" if scoring else "kl"
        assert after[written].isfinite().all()
        assert after[written].abs().sum() > 0
    collector.shutdown()


@pytest.mark.parametrize("where", CASES)
def test_all_of_them_charge_the_same(where: str) -> None:
    env, actor, reference, reward = case(where)
    with torch.no_grad():
        batch = env.rollout(12, actor, break_when_any_done=False)
    raw = batch["next"].get(reward).clone()
    after = {way: charge(way, actor, reference, reward)(batch.clone())["next"] for way in WAYS}
    for name in ("constrained", "parts", "retrieve"):
        torch.testing.assert_close(after[name]["kl"], after["legacy"]["kl"], atol=1e-5, rtol=1e-4)
        charged = after[name].get(reward)
        torch.testing.assert_close(charged, raw - COEF * after[name]["kl"], atol=1e-6, rtol=1e-5)
    if where == "one key":  # each head's log-ratio, by hand
        (p, log_p), (q, log_q) = (by_hand(model, batch) for model in (actor, reference))
        torch.testing.assert_close(after["legacy"]["kl"].squeeze(-1), log_p - log_q)
        exact = sum(torch.distributions.kl_divergence(*pair) for pair in zip(p, q, strict=True))
        torch.testing.assert_close(after["constrained, exact"]["kl"].squeeze(-1), exact)
        with pytest.raises(KeyError, match="keep the parameters"):
            charge("constrained, exact", actor, reference, reward)(batch.exclude("params"))
    dist, ref_dist = (m.get_dist(batch.copy()) for m in (actor, reference))
    exact = exact_kl(dist, ref_dist).unsqueeze(-1)
    torch.testing.assert_close(after["constrained, exact"]["kl"], exact, atol=1e-5, rtol=1e-4)
    charged = after["constrained, exact"].get(reward)
    torch.testing.assert_close(charged, raw - COEF * exact, atol=1e-5, rtol=1e-4)


def test_each_part_is_usable_alone() -> None:
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


def plain_env() -> TransformedEnv:
    return make_env(gym("Pendulum-v1", 1), seed=3)


@pytest.mark.parametrize("kind", [SerialEnv, pytest.param(ParallelEnv, marks=pytest.mark.services)])
def test_around_batched_workers(kind) -> None:
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
