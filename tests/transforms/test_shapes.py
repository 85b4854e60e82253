"""One rule for shapes: KLs per agent, or per team, against plain float64 sums."""

from itertools import product

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Normal
from torchrl.data import Composite, Unbounded
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.modules import IndependentNormal, ProbabilisticActor

from klrl.kl import (
    KLComputation,
    KLConstrainedTransform,
    KLDivergenceTransform,
    RetrieveKL,
    RetrieveLogProb,
    RewardAdjustmentTransform,
)
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.agents import apart
from tests.conftest import marked
from tests.transforms.agents import ACTION, AGENTS, REWARDS, Agents, agents_actor
from tests.transforms.heads import composite
from tests.transforms.toys import COEF, charge

REWARDED = ("each", "team")
#: A distribution and the batch of environments: without one, one number and three subtract too.
POLICIES = ((IndependentNormal, (2,)), (Normal, (2,)), (IndependentNormal, ()))
#: Ways to charge, each with its estimator.
WAYS = {
    "legacy": "k1",
    "constrained": "k1",
    "constrained, k3": "k3",
    "constrained, exact": "exact",
    "parts": "k1",
    "parts, k2": "k2",
    "retrieve": "k1",
}
pytestmark = pytest.mark.filterwarnings("ignore:no .*log_prob.* for some actions:UserWarning")


def true_kl(batch: TensorDict, reference: nn.Module, estimator: str, rewarded: str) -> Tensor:
    """In float64 from the densities' formula; the log-ratio is summed before it is estimated."""
    ref = reference.get_dist_params(batch.select(("agents", "observation")))["agents"]
    (m, s), (n, t) = ((x["loc"].double(), x["scale"].double()) for x in (batch["agents"], ref))
    over = -1 if rewarded == "each" else (-1, -2)
    if estimator == "exact":
        return ((t / s).log() + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5).sum(over)[..., None]
    action = batch[ACTION].double()
    r = ((t / s).log() - ((action - m) / s) ** 2 / 2 + ((action - n) / t) ** 2 / 2).sum(over)
    return {"k1": r, "k2": r**2 / 2, "k3": (-r).exp() - 1 + r}[estimator][..., None]


@pytest.mark.parametrize(
    ("way", "rewarded", "distribution", "batched"),
    marked(
        "slow",
        [(*each, *policy) for each in product(WAYS, REWARDED) for policy in POLICIES],
        *((*each, *POLICIES[i % 3]) for i, each in enumerate(product(WAYS, REWARDED))),
    ),
)
def test_agents_are_charged_each_or_as_a_team(way, rewarded, distribution, batched) -> None:
    torch.manual_seed(0)
    actor, reference = apart(agents_actor(distribution))
    key = REWARDS[rewarded]
    with torch.no_grad():
        batch = Agents(rewarded, *batched).rollout(6, actor)
    raw = batch["next"].get(key).clone()
    after = charge(way, actor, reference, key)(batch.clone())["next"]
    kl = true_kl(batch, reference, WAYS[way], rewarded)
    assert kl.shape == raw.shape
    assert kl.abs().mean() > 0.1
    torch.testing.assert_close(after["kl"].double(), kl, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.get(key).double(), raw - COEF * kl, atol=1e-4, rtol=1e-4)
    env = TransformedEnv(Agents(rewarded, *batched), charge(way, actor, reference, key))
    check_env_specs(env)
    with torch.no_grad():
        stepped = env.rollout(6, actor)
    kl = true_kl(stepped, reference, WAYS[way], rewarded)
    torch.testing.assert_close(stepped["next", "kl"].double(), kl, atol=1e-4, rtol=1e-4)
    raw = -(stepped[ACTION].double() ** 2).sum(-1, keepdim=True)
    raw = raw if rewarded == "each" else raw.sum(-2)
    charged = stepped["next"].get(key).double()
    torch.testing.assert_close(charged, raw - COEF * kl, atol=1e-4, rtol=1e-4)


def joint() -> ProbabilisticActor:
    """One policy for all agents, with one log-prob: it cannot be charged to each."""
    params = ["loc", "scale"]
    module = TensorDictModule(
        nn.Sequential(nn.Flatten(-2), nn.Linear(12, 12), NormalParamExtractor()),
        [("agents", "observation")],
        params,
    )
    return ProbabilisticActor(
        module, params, distribution_class=IndependentNormal, return_log_prob=True
    )


@pytest.mark.parametrize("way", [way for way in WAYS if way != "parts, k2"])
def test_a_joint_policy_is_refused_rewards_per_agent(way: str) -> None:
    actor = joint()
    data = TensorDict({"agents": {"observation": torch.randn(5, AGENTS, 4)}}, [5])
    batch = actor(data).detach()
    batch["next"] = TensorDict({"reward": torch.zeros(5, AGENTS, 1)}, [5])
    with pytest.raises(ValueError, match=r"\(5,\), the reward \(5, 3, 1\)"):
        charge(way, actor, actor, "reward")(batch)
    batch["next"] = TensorDict({"reward": torch.zeros(5, 1)}, [5])
    assert charge(way, actor, actor, "reward")(batch)["next", "kl"].shape == (5, 1)


def heads_of_agents() -> ProbabilisticTensorDictSequential:
    """Two heads for each agent; their distribution's batch shape is the data's."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, seen: Tensor) -> tuple[Tensor, ...]:
            locs = self.net(seen).split(2, -1)
            return locs[0], torch.ones_like(locs[0]), locs[1], torch.ones_like(locs[1])

    return composite(Heads(), dict.fromkeys(("move", "turn"), Normal))


def test_the_exact_kl_of_a_composite_has_no_agents() -> None:
    """It is one number per step: refused where agents are rewarded, or have an advantage, each."""
    actor, reference = apart(heads_of_agents())
    with torch.no_grad():
        batch = actor(TensorDict({"observation": torch.randn(5, AGENTS, 4)}, [5]))
    batch["next"] = TensorDict({"reward": torch.zeros(5, AGENTS, 1)}, [5])
    with pytest.raises(ValueError, match=r"composite.*k1.*\(5,\), the reward \(5, 3, 1\)") as said:
        KLConstrainedTransform(reference, estimator="exact")(batch)
    assert "\n" not in str(said.value)
    assert KLConstrainedTransform(reference)(batch)["next", "kl_penalty"].shape == (5, AGENTS, 1)
    batch["advantage"] = torch.ones(5, AGENTS, 1)
    for kind in (KLPENPPOLoss, ClipPPOLoss):
        loss = kind(actor, reference=reference, ref_kl_coef=1.0, ref_kl_estimator="exact")
        with pytest.raises(ValueError, match=r"composite.* \[5\], the advantage has 3 dim"):
            loss._add_reference_kl(TensorDict({}, []), batch)
    with pytest.raises(ValueError, match=r"composite.* \[5\], the advantage has 3 dim"):
        KLPENPPOLoss(actor).kl_old_new(batch)


def test_several_objectives_are_no_agents() -> None:
    actor = agents_actor(Normal)
    with torch.no_grad():
        batch = Agents("team", 2).rollout(4, actor)
    batch["next", "reward"] = torch.zeros(2, 4, AGENTS)
    for way in WAYS:
        with pytest.raises(ValueError, match=r"\(2, 4, 3\).*must end in a dimension of 1"):
            charge(way, actor, actor, "reward")(batch.clone())


def test_each_part_alone_follows_the_rule() -> None:
    """Log-probs [2, 3] of agents, written by hand: r = 1, 2, 3 and 4, 5, 6."""
    log_prob = torch.tensor([[-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])
    ratio = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for shape, kl in (((2, 3, 1), ratio[..., None]), ((2, 1), torch.tensor([[6.0], [15.0]]))):
        batch = TensorDict(
            {
                "action_log_prob": log_prob,
                "next": {"ref_log_prob": log_prob - ratio, "reward": torch.zeros(shape)},
            },
            [2],
        )
        KLDivergenceTransform(estimator="k2")(batch)
        torch.testing.assert_close(batch["next", "kl_penalty"], kl**2 / 2)
        batch["next", "kl_penalty"] = ratio
        RewardAdjustmentTransform(0.5)(batch)
        torch.testing.assert_close(batch["next", "reward"], -0.5 * kl)
    batch["next", "kl_penalty"] = torch.zeros(2)
    batch["next", "reward"] = torch.zeros(2, 3, 1)
    with pytest.raises(ValueError, match=r"kl_penalty.*\(2,\), the reward \(2, 3, 1\)"):
        RewardAdjustmentTransform(0.5)(batch)


def test_log_probs_of_agents_beside_no_transform_that_scored_them() -> None:
    """KLComputation cannot tell [2, 3] from tokens: ``per_token=False`` says it."""
    ratio = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    batch = TensorDict({"p": ratio, "next": {"q": 0 * ratio, "reward": torch.zeros(2, 1)}}, [2])
    KLComputation("p", "q", per_token=False)(batch)
    assert batch["next", "reward"].tolist() == [[-6.0], [-15.0]]
    assert float(batch["next", "kl_penalty"].sum()) == 21.0


class TwoRewards(Agents):
    """Rewards each agent, and the team beside."""

    def __init__(self) -> None:
        super().__init__("each", 2)
        self.reward_spec = Composite(
            self.full_reward_spec.clone(), team=Unbounded(shape=(2, 1)), shape=(2,)
        )

    def rewards(self, tensordict: TensorDict) -> dict:
        (each,) = super().rewards(tensordict).values()
        return {REWARDS["each"]: each, "team": each.sum(-2)}


@pytest.mark.parametrize("charged", [("agents", "reward"), "team"])
@pytest.mark.parametrize("way", WAYS)
def test_of_several_rewards_the_chosen_one_is_charged(way: str, charged) -> None:
    torch.manual_seed(0)
    actor, reference = apart(agents_actor(IndependentNormal))
    env = TransformedEnv(TwoRewards(), charge(way, actor, reference, charged))
    check_env_specs(env)
    with torch.no_grad():
        batch = env.rollout(5, actor)
    kl = true_kl(batch, reference, WAYS[way], "team" if charged == "team" else "each")
    torch.testing.assert_close(batch["next", "kl"].double(), kl, atol=1e-4, rtol=1e-4)
    raw = -(batch[ACTION].double() ** 2).sum(-1, keepdim=True)
    rewards = {("agents", "reward"): raw, "team": raw.sum(-2)}
    rewards[charged] = rewards[charged] - COEF * kl
    for key, value in rewards.items():
        torch.testing.assert_close(batch["next"].get(key).double(), value, atol=1e-4, rtol=1e-4)


def test_none_of_several_rewards_is_charged_unasked() -> None:
    actor = agents_actor(IndependentNormal)
    for part in (RetrieveKL(actor, actor), RetrieveLogProb(actor), KLDivergenceTransform()):
        env = TransformedEnv(TwoRewards(), part)
        with pytest.raises(ValueError, match=r"rewards .*team.*: choose one by its key"):
            env.rollout(2, actor)
