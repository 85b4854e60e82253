"""The running scale of rewards, against Gymnasium's wrapper and sums written out."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from klrl.config import AdvantageConfig
from klrl.control.run.advantage import RewardNormalizer, discounted, learned_reward
from klrl.kl.charge import RAW_REWARD_KEY
from klrl.runs.rows import read_rows
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import exits

GAMMA = 0.9


def test_the_scale_is_that_of_gymnasiums_wrapper() -> None:
    """In two rollouts without the end of an episode, where both mean the same."""
    plain = gym.make_vec("Pendulum-v1", 3)
    envs = gym.wrappers.vector.NormalizeReward(plain, gamma=GAMMA)
    normalizer = RewardNormalizer(GAMMA)
    envs.reset(seed=4)
    envs.action_space.seed(4)
    for length in (7, 40):
        rewards = []
        for _ in range(length):
            before = envs.accumulated_reward.copy()
            envs.step(envs.action_space.sample())
            rewards.append(envs.accumulated_reward - GAMMA * before)
        raw = torch.tensor(np.array(rewards).T).unsqueeze(-1)  # [N, T, 1]
        scale = normalizer.update(raw, torch.zeros_like(raw, dtype=torch.bool))
        assert scale == pytest.approx(
            1 / np.sqrt(envs.return_rms.var + 1e-8), rel=1e-6
        )  # it adds up in float32
    envs.close()


def test_no_sum_crosses_the_end_of_an_episode() -> None:
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(2, 3, 5, 1, generator=generator, dtype=torch.float64)  # two rollouts
    done = torch.rand(2, 3, 5, 1, generator=generator) < 0.3
    done[0, 1, -1] = True  # ... between two rollouts too
    normalizer = RewardNormalizer(GAMMA)
    sums: list[float] = []
    held = np.zeros(3)
    for rollout in range(2):
        for t in range(5):
            held = reward[rollout, :, t, 0].numpy() + GAMMA * held
            sums += held.tolist()
            held = np.where(done[rollout, :, t, 0], 0.0, held)
        scale = normalizer.update(reward[rollout], done[rollout])
        # Gymnasium starts from 1e-4 of a count, at mean 0 and variance 1.
        assert scale == pytest.approx(1 / np.std(sums), rel=1e-3)
    again = RewardNormalizer(GAMMA)
    again.load_state_dict(json.loads(json.dumps(normalizer.state_dict())))
    assert again.scale == scale
    assert again.state_dict() == normalizer.state_dict()


@pytest.mark.parametrize(("copies", "steps"), [(1, 40), (5, 17), (300, 3)])
def test_sums_over_time_are_those_of_python_floats_to_the_bit(copies: int, steps: int) -> None:
    delta = torch.randn(copies, steps, 1)
    decay = 0.93 * (torch.rand(copies, steps, 1) < 0.8).float()
    found = discounted(delta, decay)
    for i in range(copies):
        later = 0.0
        for t in reversed(range(steps)):
            later = float(delta[i, t]) + float(decay[i, t]) * later
            assert found[i, t] == torch.tensor(later)
    normalizer, done = RewardNormalizer(GAMMA), decay == 0
    normalizer.update(delta, done)
    for i in range(copies):
        g = 0.0
        for t in range(steps):
            g = (float(delta[i, t]) + g) * GAMMA * float(not done[i, t])
        assert normalizer.state_dict()["sums"][i] == g


def test_rewards_that_are_all_0_have_no_scale() -> None:
    normalizer, zeros = RewardNormalizer(GAMMA), torch.zeros(2, 50, 1)
    no = torch.zeros_like(zeros, dtype=torch.bool)
    assert [normalizer.update(zeros, no) for _ in range(3)] == [1.0] * 3
    once = zeros.clone()
    once[0, 10] = 1.0
    sums = np.zeros((2, 50))
    sums[0, 10:] = GAMMA ** np.arange(40)
    assert normalizer.update(once, no) == pytest.approx(1 / sums.std(), rel=1e-3)
    assert normalizer.update(zeros, no) > normalizer.update(once, no) > 1.0


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_it_follows_the_reward_that_is_learned_from_and_not_the_raw_one(weight: float) -> None:
    """(weight * raw - penalty) * scale, over the deviation of its own discounted sums."""
    generator = torch.Generator().manual_seed(0)
    raw, penalty = torch.randn(2, 2, 30, 1, generator=generator, dtype=torch.float64)
    penalty = 3 * penalty
    after = {"reward": raw - penalty, RAW_REWARD_KEY: raw, "done": torch.zeros(2, 30, 1).bool()}
    config = AdvantageConfig(GAMMA, 0.9, reward_weight=weight)
    batch = TensorDict({"next": after}, [2, 30])
    learned = learned_reward(batch, config, 0.1, RewardNormalizer(GAMMA))
    seen = 0.1 * (weight * raw - penalty)
    sums, held = [], np.zeros(2)
    for t in range(30):
        held = seen[:, t, 0].numpy() + GAMMA * held
        sums += held.tolist()
    torch.testing.assert_close(learned, seen / np.std(sums), rtol=1e-3, atol=0.0)


def test_a_resumed_run_that_begins_new_episodes_carries_no_sum_into_them(settings) -> None:
    parts = Training(settings("env.normalize_reward=true")).parts
    normalizer = parts.components()["reward_normalizer"]
    normalizer.load_state_dict({**normalizer.state_dict(), "sums": [5.0, 5.0]})
    parts.components()["rollout"].load_state_dict({"copies": torch.zeros(3, dtype=torch.uint8)})
    said: list[str] = []
    rollout = parts.rollout(3, said.append)
    assert any("this run begins new episodes" in line for line in said)
    batch, plain = rollout.collect(), RewardNormalizer(parts.config.advantage.gamma)
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    plain.update(parts.config.env.reward_scale * batch["next", "reward"], batch["next", "done"])
    assert normalizer.state_dict()["sums"] == plain.state_dict()["sums"]
    rollout.close()


@pytest.mark.integration
def test_only_the_learner_sees_it(tmp_path: Path) -> None:
    """The first rollout's rewards and KL are recorded as they are; its critic's loss is not."""
    first = {}
    for flag in ("false", "true"):
        words = (f"env.normalize_reward={flag}", f"hydra.run.dir={flag}", "env.reward_scale=1")
        assert exits(*QUICK, *words) == 0
        first[flag] = read_rows(Path(flag) / "metrics.jsonl")[0]
    for name in ("reward/raw", "reward/shaped", "kl/ref/exact"):
        assert first["true"][name] == first["false"][name]
    assert first["true"]["learner/reward_norm"] < 0.3
    assert "learner/reward_norm" not in first["false"]
    assert first["true"]["loss/critic"] < 0.1 * first["false"]["loss/critic"]


@pytest.mark.integration
def test_a_kl_in_the_loss_is_scaled_as_the_rewards_are() -> None:
    words = ("frames=64", "learner.epochs=1", "learner.minibatches=1", "kl.coef=0.4")
    placed = ("kl.placement=split", "kl.estimator=exact", "loss.normalize_advantage=false")
    other = ("reference=checkpoint", "reference.path=teacher", "env.normalize_reward=true")
    assert exits(*QUICK, "optim.lr=0.05", "hydra.run.dir=teacher") == 0
    assert exits(*QUICK, *words, *placed, *other, "hydra.run.dir=run", "env.reward_scale=0.1") == 0
    (row,) = read_rows(Path("run/metrics.jsonl"))
    entry = Path("run/checkpoints/last/frames-000000000064/state.json")
    state = dict(json.loads(entry.read_text())["reward_normalizer"]["items"])
    expected = 0.4 * 0.1 * state["scale"] * row["kl/ref/exact"]
    assert row["loss/kl_ref"] == pytest.approx(expected, rel=1e-4)
