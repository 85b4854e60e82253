"""``collector.staleness`` in control, in a run: lag, queue, resume, normalisers, lines."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from klrl.base.errors import ConfigError
from klrl.control.run.advantage import RewardNormalizer, learned_reward
from klrl.control.run.kl import SAMPLER_LOG_PROB
from klrl.control.run.stale import StaleFrames, room
from klrl.losses.policy import PolicyLoss
from klrl.runs.state import decode, encode
from klrl.train import stale
from klrl.train.loop import Training
from klrl.train.scores import CLOSING, Size
from tests.control import simulators


def batch_logs(batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[SAMPLER_LOG_PROB], batch["action_log_prob"]


LEARNS = ("optim.lr=0.01", "eval.every=0")
NORMAL = torch.distributions.Normal


def iterate(training: Training, rollout):
    """One iteration as the loop makes it: batch, row, and the agent before the update."""
    batch = rollout.collect()
    before = deepcopy(training.parts.agent)
    training.parts.charge_kl(batch)
    training.parts.estimate_advantage(batch)
    row = dict(training.parts.rewards(batch).own)
    row |= training.learn(batch)
    training.parts.update_normalizer(batch)
    training.counters.iteration += 1
    return batch, row, before


def exact_kl(one: dict, other: dict) -> float:
    """KL(one||other) per frame by torch."""
    if "logits" in one:
        p, q = (torch.distributions.Categorical(logits=x["logits"].double()) for x in (one, other))
        return float(torch.distributions.kl_divergence(p, q).mean())
    p, q = (NORMAL(x["loc"].double(), x["scale"].double()) for x in (one, other))
    return float(torch.distributions.kl_divergence(p, q).sum(-1).mean())


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    "words",
    [
        ["loss=clip", "loss.anchor=sampler", "kl=legacy"],
        ["env=cartpole", "actor=categorical", "loss=clip", "loss.sampler_weight=mask"],
        ["actor=tanh_normal", "loss.sampler_weight=truncate", "kl=none"],
        ["loss=trpo", "loss.sampler_weight=mask", "kl.placement=loss", "kl.estimator=k3"],
    ],
    ids=["normal", "categorical", "tanh_normal", "trpo"],
)
def test_a_rollout_is_that_of_the_policy_of_n_updates_ago(settings, words, staleness) -> None:
    training = Training(settings(*LEARNS, *words, f"collector.staleness={staleness}"))
    rollout, agents = training.parts.rollout(0), []
    for iteration in range(staleness + 3):
        batch, row, before = iterate(training, rollout)
        agents.append(before)
        lag = min(iteration, staleness)
        assert row["sampler/lag"] == lag
        both = []
        for agent, at in ((agents[iteration - lag], batch["sampler"]), (before, batch)):
            family = agent.family
            with torch.no_grad():
                outputs = agent.policy_net(batch["observation"])
            params = dict(zip(family.param_keys, outputs, strict=True))
            log_prob = family.log_prob(params, batch[family.sample_key])
            key = "log_prob" if at is not batch else "action_log_prob"
            torch.testing.assert_close(at[key], log_prob, rtol=0, atol=1e-6)
            both.append(params)
        assert row["kl/sampler/exact"] == pytest.approx(exact_kl(*both), rel=1e-4, abs=1e-7)
        assert (row["kl/sampler/exact"] > 1e-5) == (lag > 0)
        log_mu, old = (x.double() for x in batch_logs(batch))
        assert row["kl/sampler/k3"] == pytest.approx(
            float(((old - log_mu).exp() - 1 - (old - log_mu)).mean())
        )
        assert row["kl/sampler/max"] == float((old - log_mu).abs().max())
        assert ("loss/masked" in row) == ("loss.sampler_weight=mask" in words)
        # Today's critic values the queued states.
        with torch.no_grad():
            value = before.critic.module(batch["observation"])
        torch.testing.assert_close(batch["state_value"], value, rtol=0, atol=1e-6)
        # The statistics have every rollout once, after its update.
        count = training.config.frames_per_iteration * (iteration + 1)
        assert int(training.parts.agent.normalizer.count) == count
    assert len(rollout.waiting) == staleness
    rollout.close()


class Surrogate(PolicyLoss):
    """A custom loss that weights steps by the sampler itself."""

    def gain(self, scored, advantage, beta):
        return (scored.log_prob - scored.log_mu).exp() * advantage


class MonteCarlo:
    """``advantage=custom``: what gae with lmbda=1 gives."""

    def __init__(self, config, critic, reward_scale, normalizer):
        self.how, self.critic = (config, reward_scale, normalizer), critic

    def __call__(self, batch):
        value, after = self.critic.module(batch["observation"]), batch["next"]
        reward = learned_reward(batch, *self.how)
        later = self.critic.module(after["observation"]) * ~after["terminated"]
        done, total, gamma = after["done"], later[:, -1], self.how[0].gamma
        returns = torch.zeros_like(value)
        for t in reversed(range(value.shape[1])):
            total = reward[:, t] + gamma * torch.where(done[:, t], later[:, t], total)
            returns[:, t] = total
        batch["state_value"], batch["value_target"] = value, returns
        batch["advantage"] = returns - value


@pytest.mark.parametrize("words", [["loss.sampler_weight=mask"], ["loss=clip"], []], ids=str)
def test_a_custom_advantage_has_a_steps_own_charge_once(settings, words) -> None:
    words = [*words, "kl=legacy", "collector.staleness=1", "env.normalize_reward=true"]
    own = ("advantage=custom", "advantage.target=tests.control.test_stale_runs:MonteCarlo")
    found = []
    for how in (own, ("advantage.lmbda=1",)):
        training = Training(settings(*LEARNS, *words, *how, "kl.coef=3"))
        rollout = training.parts.rollout(0)
        iterate(training, rollout)
        found.append(iterate(training, rollout)[0])
        rollout.close()
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-4)


def test_the_reward_normaliser_sees_the_rollouts_in_the_order_of_sampling(settings) -> None:
    words = ("env.normalize_reward=true", "collector.staleness=2", "kl=none", *LEARNS)
    training, seen = Training(settings(*words)), []
    rollout = training.parts.rollout(0)
    for _ in range(5):
        batch = iterate(training, rollout)[0]
        seen.append((batch["next", "reward"], batch["next", "done"]))
    plain = RewardNormalizer(training.config.advantage.gamma)
    for reward, done in seen:
        plain.update(training.config.env.reward_scale * reward, done)
    assert training.parts._reward_normalizer.state_dict() == plain.state_dict()
    rollout.close()


def test_a_sum_of_rewards_ends_where_the_waiting_rollout_begins_new_episodes(settings) -> None:
    """Simulators that exist once; evaluations step them, so that the next rollout begins anew."""
    simulators.once.cache_clear()
    own = ("env=custom", "env.target=tests.control.simulators:once", "env.num_envs=4")
    words = (*own, "env.normalize_reward=true", "collector.staleness=2", "collector.steps=8")
    training = Training(settings(*words, *LEARNS, "kl=none", "env.normalize_observation=false"))
    rollout, gamma = training.parts.rollout(0), training.config.advantage.gamma
    sums, running = [], {}  # trajectory -> its discounted sum so far
    for _ in range(6):
        batch = iterate(training, rollout)[0]
        for n in range(4):
            for t in range(8):
                name = int(batch["collector", "traj_ids"][n, t])
                reward = float(batch["next", "reward"][n, t]) * training.config.env.reward_scale
                running[name] = reward + gamma * running.get(name, 0.0)
                sums.append(running[name])
        training.parts.evaluation(CLOSING, Size(4))
    scale = training.parts._reward_normalizer.scale
    assert scale == pytest.approx(1 / np.std(sums), rel=1e-5)
    rollout.close()


@pytest.mark.parametrize(
    "word", ["loss.anchor=sampler", "loss.sampler_weight=truncate", "collector.staleness=2"]
)
def test_a_run_is_the_one_that_reads_no_sampler_until_a_rollout_is_stale(settings, word) -> None:
    """To the bit; a waiting rollout draws before the first update does."""
    batches, rows = [], []
    for how in ([], [word]):
        training = Training(settings(*LEARNS, "loss=clip", *how))
        rollout = training.parts.rollout(0)
        for _ in range(3):
            batch, row, _ = iterate(training, rollout)
            batches.append(batch)
            rows.append(row)
        rollout.close()
    assert torch.equal(batches[0]["action"], batches[3]["action"])
    if "staleness" not in word:
        for plain, read in zip(rows[:3], rows[3:], strict=True):
            assert {name: read[name] for name in plain} == plain


@pytest.mark.parametrize("words", [[], ["env=cartpole"], ["env=catch", "actor=cnn"]], ids=str)
def test_a_restored_queue_has_the_same_rollouts(settings, words) -> None:
    training = Training(settings(*words, "collector.staleness=2", *LEARNS))
    rollout = training.parts.rollout(0)
    iterate(training, rollout)
    copied, tensors = StaleFrames(training.config, training.parts.agent), {}
    copied.load_state_dict(decode(encode(rollout.state_dict(), tensors), tensors))
    assert [each["updates"] for each in copied.waiting] == [0, 0]
    for one, other in zip(rollout.waiting, copied.waiting, strict=True):
        assert (TensorDict(one["batch"]) == TensorDict(other["batch"])).all()
    # What the run says of their memory is what they take.
    size = max(TensorDict(each["batch"]).bytes() for each in rollout.waiting)
    (told,) = room(training.config, training.parts.agent, torch.device("cpu"))
    claimed = float(told.split("up to ")[1].split(" MB")[0]) * 1e6
    assert 2 * size <= claimed * 1.01 <= 2.2 * size
    rollout.close()


def test_the_queue_takes_at_most_half_of_the_memory(settings, monkeypatch) -> None:
    monkeypatch.setattr(stale, "memory", lambda device: 10**4)
    told = r"^collector.staleness=3: .*, more than half of .*; lower it, env.num_envs or"
    with pytest.raises(ConfigError, match=told):
        Training(settings("collector.staleness=3"))


@pytest.mark.parametrize(
    ("words", "anchor", "line"),
    [
        (["loss=clip"], "old", None),
        (["loss=clip", "collector.staleness=1"], "sampler", "loss.anchor=sampler"),
        (["loss=clip", "collector.staleness=1", "loss.anchor=old"], "old", "loss.anchor=old"),
        (
            ["loss=clip", "collector.staleness=1", "loss.sampler_weight=mask"],
            "old",
            "loss.anchor=old",
        ),
        (["collector.staleness=1"], "old", "loss=klpen keeps KL(old||new) and the anchor old"),
        (
            ["loss=custom", f"loss.target={__name__}:Surrogate", "collector.staleness=1"],
            "old",
            "loss=custom may read the sampler: scored.log_mu",
        ),
        (
            ["loss=trpo", "collector.staleness=1"],
            "old",
            "loss=trpo keeps KL(old||new) and the anchor old",
        ),
    ],
    ids=str,
)
def test_the_anchor_is_the_sampler_where_it_is_stale(settings, words, anchor, line) -> None:
    training = Training(settings(*words))
    assert training.parts.learner.loss.anchor == anchor
    told = [each for each in training.parts.preflight if each.startswith("collector.staleness=")]
    assert [each.partition("; ")[2] for each in told] == ([] if line is None else [line])
