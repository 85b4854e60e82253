"""``collector=vector`` against TorchRL's own collector, given the same actions, key by key."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from klrl.base.errors import NonFiniteError
from klrl.control.env.copies import VectorGymEnv, transformed
from klrl.control.policy.acting import NumpyActing, TorchActing, arrays_of, make_acting
from klrl.control.policy.distributions import Normal
from klrl.control.policy.networks import Agent
from klrl.control.run.rollout import TorchRLRollout, VectorRollout
from klrl.kl import KLConstrainedTransform, KLRewardTransform
from tests.agents import agent_of, gym, make_env, moved
from tests.conftest import marked
from tests.control.toys import Drifting

CPU = torch.device("cpu")
COPIES, STEPS = 3, 130
TOYS = "tests.control.toys:klrl-test"


def make_actor(distribution: str, env, activation: str = "tanh") -> Agent:
    agent = agent_of(env, distribution, (16, 16), activation, init_std=0.7)
    moved(agent.modules)
    return agent


class Scripted(TensorDictModuleBase):
    """The policy, with the samples that another rollout took."""

    def __init__(self, agent: Agent, batches: list[TensorDictBase]) -> None:
        super().__init__()
        self.in_keys = ["observation"]
        family = agent.family
        self.out_keys = [*family.param_keys, "action", "action_log_prob"]
        if family.sample_key != "action":
            self.out_keys.append(family.sample_key)
        self.agent, self.batches, self.step = agent, batches, 0
        self.net = agent.policy_net

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        family = self.agent.family
        index, t = divmod(self.step, STEPS)
        self.step += 1
        script = self.batches[index][:, t]
        with torch.no_grad():
            outputs = self.agent.policy_net(td["observation"])
        params = dict(zip(family.param_keys, outputs, strict=True))
        for key, value in params.items():
            td[key] = value
        for key in {"action", family.sample_key}:
            td[key] = script[key]
        td["action_log_prob"] = family.log_prob(params, script[family.sample_key])
        return td


CASES = {
    "pendulum": ("Pendulum-v1", "normal", None),
    "tanh_normal": ("Pendulum-v1", "tanh_normal", None),
    "cartpole": ("CartPole-v1", "categorical", None),
    "hopper": ("Hopper-v5", "normal", None),
    "several": (f"{TOYS}/Copying-v0", "categorical", None),
    "masked": (f"{TOYS}/Masked-v0", "categorical", None),
    "legacy_online": (
        "CartPole-v1",
        "categorical",
        lambda agent: [
            KLRewardTransform(agent.actor, 0.3, kl_key="kl_penalty", raw_reward_key="reward_raw")
        ],
    ),
    "constrained_online": (
        "Hopper-v5",
        "tanh_normal",
        lambda agent: [KLConstrainedTransform(agent.actor, 0.3)],
    ),
}


@pytest.mark.parametrize(
    "case", marked("integration", CASES, "pendulum", "cartpole", "hopper", "several", "masked")
)
def test_the_same_actions_give_the_same_batch(case: str) -> None:
    """Two rollouts in a row, over several ends of episodes; every key of either side."""
    env_id, distribution, more = CASES[case]

    def env_with(agent: Agent | None) -> TransformedEnv:
        extra = more(agent) if more and (agent or "online" not in case) else []
        base = VectorGymEnv(env_id, COPIES, seed=5)
        return TransformedEnv(base, Compose(RewardSum(), StepCounter(), *extra))

    agent = make_actor(distribution, env_with(None))
    native = VectorRollout(env_with(agent), agent, STEPS, CPU)
    mine = [native.collect().clone() for _ in range(2)]
    native.close()
    assert torch.cat([b["next", "done"] for b in mine]).any()
    scripted = Scripted(agent, mine)
    stock = TorchRLRollout(env_with(agent), SimpleNamespace(actor=scripted), STEPS, CPU)
    scripted.step = 0  # TorchRL has tried it on a made-up observation
    for batch in mine:
        theirs = stock.collect()
        keys = set(theirs.keys(include_nested=True, leaves_only=True))
        assert set(batch.keys(include_nested=True, leaves_only=True)) == keys
        assert batch.names == theirs.names
        for key in keys:
            assert batch[key].dtype == theirs[key].dtype, key
            mine_, theirs_ = batch[key].double(), theirs[key].double()
            assert float((mine_ - theirs_).abs().mean()) <= 1e-6, key
            # A log-prob is a sum of terms of order 10, in float32, of matrix products whose
            # order of summation depends on the batch: single ones differ in the sixth digit.
            torch.testing.assert_close(mine_, theirs_, rtol=1e-6, atol=1e-5, msg=key)
    stock.close()


@pytest.mark.parametrize("distribution", ["normal", "tanh_normal", "categorical"])
def test_actions_are_draws_of_the_policy(distribution: str) -> None:
    """Standardised samples are standard normal; frequencies are the mean probabilities."""
    env_id = "CartPole-v1" if distribution == "categorical" else "Pendulum-v1"
    env = make_env(gym(env_id, 8), seed=0)
    agent = make_actor(distribution, env)
    batch = VectorRollout(env, agent, 2500, CPU).collect()
    if distribution == "categorical":
        p = batch["logits"].softmax(-1)[..., 1]
        took = (batch["action"] == 1).float()
        spread = float((p * (1 - p)).sum().sqrt())
        assert abs(float((took - p).sum())) < 4 * spread
        assert 0.02 < float(p.mean()) < 0.98
    else:
        z = (batch[agent.family.sample_key] - batch["loc"]) / batch["scale"]
        assert float(z.mean()) == pytest.approx(0.0, abs=4 / 2500**0.5 / 8**0.5)
        assert float(z.std()) == pytest.approx(1.0, abs=0.02)
        assert abs(float((z[:, 1:] * z[:, :-1]).mean())) < 0.03, "no noise is used twice"


@pytest.mark.parametrize(
    ("env_id", "action", "distribution", "activation"),
    [
        ("Hopper-v5", None, "normal", "tanh"),
        ("Hopper-v5", None, "tanh_normal", "relu"),
        ("Hopper-v5", None, "normal", "elu"),
        ("CartPole-v1", None, "categorical", "silu"),
        (f"{TOYS}/Copying-v0", "multi_discrete", "categorical", "tanh"),
        (f"{TOYS}/Copying-v0", "multi_binary", "categorical", "relu"),
    ],
)
def test_numpy_and_torch_act_alike(env_id, action, distribution, activation) -> None:
    kwargs = {} if action is None else {"action": action}
    env = make_env(gym(env_id, 5, **kwargs), seed=0)
    agent = make_actor(distribution, env, activation)
    assert agent.normalizer is not None
    agent.normalizer.update(3 + 2 * torch.randn(50, agent.normalizer.mean.shape[0]))
    observation = torch.randn(5, agent.normalizer.mean.shape[0]).numpy() * 4
    made = (
        NumpyActing(agent.policy_net, agent.family),
        TorchActing(agent.policy_net, agent.family, CPU),
    )
    drawn = []
    for noisy in (False, True):
        found = []
        for acting in made:
            torch.manual_seed(9)
            if noisy:
                acting.begin(2, 5)
            sample = acting.sample(1 if noisy else 0, observation)
            found.append((sample, acting.action(sample)))
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        drawn.append(found[0])
    assert (drawn[0][0] != drawn[1][0]).any()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        played = agent.actor(TensorDict({"observation": torch.from_numpy(observation)}, [5]))
    np.testing.assert_allclose(drawn[0][1], played["action"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_numpy_acts_without_a_warning_on_large_numbers(activation: str) -> None:
    """As unnormalised observations may be; a warning is an error in tests."""
    net = make_actor("normal", make_env(gym("Pendulum-v1", 2), seed=0), activation).policy_net
    net.normalizer, large = torch.nn.Identity(), np.float32([[1e4, -1e4, 1e3], [-1e3, 30, 150]])
    found = NumpyActing(net, Normal()).sample(0, large)
    expected = TorchActing(net, Normal(), CPU).sample(0, large)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mirror_is_one_copy_of_what_is_else_read_in_place() -> None:
    """``copied`` is for the parameters of a GPU."""
    tensors = [nn.Parameter(torch.randn(3, 2)), torch.randn(3), torch.randn(2, 2, 2)]
    read, mirror = (arrays_of(tensors, copied=copied) for copied in (False, True))
    assert all(x.ctypes.data == y.data_ptr() for x, y in zip(read, tensors, strict=True))
    for one, other in zip(read, mirror, strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.shares_memory(one, other)
    ends = [each.ctypes.data + each.nbytes for each in mirror]
    assert ends[:-1] == [each.ctypes.data for each in mirror[1:]]


def test_numpy_follows_weights_that_are_replaced() -> None:
    env = make_env(gym("Pendulum-v1", 1), seed=0)
    agent = make_actor("normal", env)
    acting = make_acting(agent, CPU)
    observation = np.ones((1, 3), np.float32)
    before = acting.sample(0, observation)
    for parameter in agent.modules.parameters():
        parameter.data = parameter.data + 1.0
    acting.begin(1, 1)
    acting._noise = None
    assert not np.allclose(acting.sample(0, observation), before)


class Infinite(Drifting):
    """Its observation number ``bad``, counted from 0, is infinite."""

    def __init__(self, bad: int | None, length: int) -> None:
        self.bad, self.length, self.count = bad, length, -1

    def seen(self) -> np.ndarray:
        self.count += 1
        return np.array([np.inf if self.count == self.bad else 0.0])

    def reset(self, **how):
        super().reset(**how)
        return self.seen(), {}

    def step(self, action):
        super().step(action)
        return self.seen(), 0.0, self.steps == self.length, False, {}


@pytest.mark.parametrize("rollout", [VectorRollout, TorchRLRollout])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ((None, 0), r"\(copy 1\) is not finite at reset"),
        ((None, 4), r"\(copy 1\) is not finite at reset"),
        ((3, None), r"\(copy 0\) is not finite after a step"),
    ],
)
def test_a_reset_that_is_not_finite_is_named(rollout, bad, says) -> None:
    copies = zip(bad, (4, 3), strict=True)
    env = transformed(VectorGymEnv("X", 2, make=lambda: Infinite(*next(copies))))
    agent = agent_of(env)
    with pytest.raises(NonFiniteError, match=f"observation of X {says}"):
        rollout(env, agent, 3, CPU).collect()  # copy 1 is reset after the last step


def test_other_activations_and_modules_act_in_torch() -> None:
    env = make_env(gym("Pendulum-v1", 1), seed=0)
    normed = make_actor("normal", env)
    assert isinstance(make_acting(normed, CPU), NumpyActing)
    normed.policy_net.trunk.append(nn.LayerNorm(16))
    for agent in (normed, make_actor("normal", env, "gelu")):
        assert isinstance(make_acting(agent, CPU), TorchActing)
