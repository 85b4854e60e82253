"""log pi as the policy wrote it: under an older key, filled in, or not at all."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.modules import AdditiveGaussianModule, ProbabilisticActor

from klrl.kl import KLRewardTransform, RetrieveKL
from tests.agents import apart
from tests.transforms.heads import TwoHeads, composite, two_headed_actor
from tests.transforms.test_control_family import case
from tests.transforms.toys import COEF, charge

WAYS = ("legacy", "constrained", "constrained, exact")
UNSAMPLED = "random action has no KL"


def transform(way: str, reference: nn.Module, **kwargs) -> nn.Module:
    return charge(way, reference, reference, raw_reward_key="raw", **kwargs)


def gaussian():
    """(an environment, a policy with Gaussians, the reference that it moved away from)."""
    env, actor, reference, _ = case("pendulum")
    return env, actor, reference


def log_ratio(batch: TensorDict, reference: nn.Module) -> torch.Tensor:
    """Of the action in the data, in float64, from the parameters in the data."""
    ref = reference.get_dist_params(batch.select("observation"))
    action = batch["action"].double()
    policy, other = (
        Normal(params["loc"].double(), params["scale"].double()).log_prob(action)
        for params in (batch, ref)
    )
    return (policy - other).sum(-1, keepdim=True)


@pytest.mark.parametrize("way", ["legacy", "constrained"])
def test_data_with_the_older_key_are_read(way: str) -> None:
    env, actor, reference = gaussian()
    with torch.no_grad():
        batch = env.rollout(6, actor)
    expected = log_ratio(batch, reference)
    batch.rename_key_("action_log_prob", "sample_log_prob")
    after = transform(way, reference)(batch)["next"]
    torch.testing.assert_close(after["kl"].double(), expected, atol=1e-5, rtol=1e-4)


def test_the_older_key_held_the_sum_over_heads() -> None:
    actor, reference = apart(two_headed_actor())
    with torch.no_grad():
        batch = TwoHeads().rollout(4, actor)
    today = KLRewardTransform(reference, COEF, in_keys=[("agent", "reward")], kl_key="kl")
    expected = today(batch.clone())["next", "kl"]
    keys = list(actor.log_prob_keys)
    batch["agent", "sample_log_prob"] = sum(batch.get(key) for key in keys)
    older = batch.exclude(*keys)
    torch.testing.assert_close(today(older)["next", "kl"], expected)


def random_steps(count: int = 8):
    """A batch of a collector whose first actions are random, and its environment's parts."""
    env, actor, reference = gaussian()
    collector = Collector(
        env,
        actor,
        frames_per_batch=count,
        total_frames=2 * count,
        init_random_frames=count,
        auto_register_policy_transforms=False,
    )
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return *batches, actor, reference


@pytest.mark.parametrize("way", WAYS)
def test_random_frames_in_a_batch(way: str) -> None:
    """A collector fills log-probs and parameters in with zeros; log pi = 0 is not what they say."""
    random, sampled, _, reference = random_steps()
    assert not random["action_log_prob"].any()
    batch = torch.cat([random, sampled], -1)
    raw = batch["next", "reward"].clone()
    steps = random.shape[-1]
    with pytest.warns(UserWarning, match=UNSAMPLED):
        after = transform(way, reference)(batch)["next"]
    kl, reward = after["kl"], after["reward"]
    assert kl[:, :steps].isnan().all()
    assert reward[:, :steps].isnan().all()
    rest = kl[:, steps:]
    assert rest.abs().min() > 0
    torch.testing.assert_close(reward[:, steps:], raw[:, steps:] - COEF * rest)
    if way != "constrained, exact":
        expected = log_ratio(sampled, reference)
        torch.testing.assert_close(rest.double(), expected, atol=1e-5, rtol=1e-4)


def test_a_log_prob_of_zero_is_one_where_the_policy_says_so() -> None:
    _, actor, reference, _ = case("cartpole")
    batch = actor(TensorDict({"observation": torch.zeros(2, 4)}, [2])).detach()
    key = actor.dist_params_keys[0]
    batch[key] = torch.tensor([[90.0, 0.0], [90.0, 0.0]])
    batch["action"] = torch.zeros_like(batch["action"])
    if batch["action"].ndim > 1:
        batch["action"][:, 0] = 1
    batch["action_log_prob"] = torch.zeros(2)
    batch["next"] = TensorDict({"reward": torch.zeros(2, 1)}, [2])
    after = transform("legacy", reference)(batch.clone())["next"]
    expected = -reference.log_prob(batch.copy())
    torch.testing.assert_close(after["kl"].squeeze(-1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("way", "heads"),
    [
        *((f"constrained, {name}", 1) for name in ("k1", "k2", "k3", "exact")),
        *(("legacy", 1), ("legacy", 2), ("retrieve", 1)),
    ],
)
def test_one_action_has_a_kl_of_zero(way: str, heads: int) -> None:
    """Its normalised logits are 0: parameters that a collector could have filled in."""

    class Zeros(nn.Linear):
        def forward(self, seen):
            logits = super().forward(seen).log_softmax(-1)
            return logits if heads == 1 else (logits, logits.clone())

    if heads == 1:
        module = TensorDictModule(Zeros(3, 1), ["observation"], ["logits"])
        actor = ProbabilisticActor(
            module, ["logits"], distribution_class=Categorical, return_log_prob=True
        )
    else:
        actor = composite(Zeros(3, 1), dict.fromkeys(("left", "right"), Categorical))
    with torch.no_grad():
        batch = actor(TensorDict({"observation": torch.randn(5, 3)}, [5]))
    batch["next"] = TensorDict({"reward": torch.ones(5, 1)}, [5])
    after = charge(way, actor, actor)(batch)["next"]
    assert torch.equal(after["kl"], torch.zeros(5, 1))
    assert torch.equal(after["reward"], torch.ones(5, 1))


def test_a_collectors_policy_that_cannot_score_is_named() -> None:
    env, actor, reference = gaussian()
    noise = AdditiveGaussianModule(env.action_spec)
    around = TransformedEnv(env, RetrieveKL(ref_model=reference, kl_key="kl"))
    collector = Collector(
        around,
        TensorDictSequential(actor, noise),
        frames_per_batch=4,
        total_frames=4,
        auto_register_policy_transforms=False,
    )
    with pytest.raises(TypeError, match="TensorDictSequential.*get_dist.*give gen_model"):
        next(iter(collector))
    collector.shutdown()
