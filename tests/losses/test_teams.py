"""One advantage for several agents: ratio, KLs and entropy are those of the joint action.

Expectations are sums over all joint actions, or Gauss-Hermite quadratures; no sampling.
"""

from itertools import product

import numpy as np
import pytest
import torch
import torchrl.objectives
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torchrl.modules import ProbabilisticActor, ValueOperator

from klrl.kl import freeze
from klrl.losses import ClipPPOLoss, KLPENPPOLoss

STATES, COEF, BETA = 3, 0.7, 1.3
both = pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
agents = pytest.mark.parametrize("count", [2, 3, 4])
pytestmark = pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Table(nn.Module):
    """Parameters of N agents in each state."""

    def __init__(self, distribution: type, count: int) -> None:
        super().__init__()
        self.distribution = distribution
        each = (2,) if distribution is Categorical else (2, 1)
        self.rows = nn.Parameter(0.3 * torch.randn(STATES, count, *each))

    def forward(self, state: Tensor) -> tuple[Tensor, ...] | Tensor:
        rows = torch.tensordot(state, self.rows, 1)
        if self.distribution is Categorical:
            return rows
        return rows[..., 0, 0], rows[..., 1, 0].exp()

    def at(self, state: Tensor) -> Categorical | Normal:
        out = self(state)
        return Categorical(logits=out) if isinstance(out, Tensor) else Normal(*out)


def team(distribution: type, count: int) -> ProbabilisticActor:
    keys = ["logits"] if distribution is Categorical else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(Table(distribution, count), ["state"], keys),
        keys,
        distribution_class=distribution,
        return_log_prob=True,
    )


def drifted(actor: nn.Module, by: float) -> nn.Module:
    with torch.no_grad():
        actor[0].module.rows.add_(by * torch.randn_like(actor[0].module.rows))
    return actor


def batch_of(actor: nn.Module, state: Tensor, action: Tensor, advantage: Tensor) -> TensorDict:
    """As a collector stores it, with the sampling policy's parameters; [*B, N] and [*B, 1]."""
    batch = TensorDict({"state": state, "action": action}, state.shape[:-1])
    with torch.no_grad():
        actor[0](batch)
        batch["action_log_prob"] = actor[0].module.at(state).log_prob(action)
    batch["advantage"], batch["value_target"] = (
        advantage[..., None],
        torch.zeros(*state.shape[:-1], 1),
    )
    return batch


def loss_of(kind: type, actor: nn.Module, **more: object) -> nn.Module:
    """With the terms of every frame."""
    own = {"beta": BETA} if kind is KLPENPPOLoss else {"clip_epsilon": (0.9, 99.0)}
    critic = ValueOperator(nn.Linear(STATES, 1), in_keys=["state"])
    return kind(actor, critic, reduction="none", **own, **{"functional": False, **more})


def gradient(total: Tensor, actor: nn.Module) -> Tensor:
    return torch.autograd.grad(total, actor[0].module.rows)[0]


def joint(model: nn.Module, state: Tensor, action: Tensor) -> Tensor:
    """log pi of the joint action."""
    return model[0].module.at(state).log_prob(action).sum(-1)


def team_kl(old: nn.Module, new: nn.Module, state: Tensor) -> Tensor:
    return kl_divergence(*(model[0].module.at(state) for model in (old, new))).sum(-1)


def actions(distribution: type, actor: nn.Module, state: Tensor) -> tuple[Tensor, Tensor]:
    """Joint actions [M, N] of one state and their chances [M]: all, or nodes of a quadrature."""
    dist = actor[0].module.at(state)
    count = len(dist.mean if distribution is Normal else dist.logits)
    if distribution is Categorical:
        moves = torch.tensor(list(product((0, 1), repeat=count)))
        return moves, dist.log_prob(moves).sum(-1).exp().detach()
    nodes, weights = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(9))
    z = torch.cartesian_prod(*[nodes] * count)
    weight = torch.cartesian_prod(*[weights / weights.sum()] * count).prod(-1)
    return (dist.loc + dist.scale * z).detach(), weight


@both
@agents
@pytest.mark.parametrize("distribution", [Categorical, Normal])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k3"])
def test_the_gradient_of_a_team_that_moved(kind, count: int, distribution, estimator: str) -> None:
    """E_old[w A] - beta KL(old||new) - coef KL(new||ref), w the ratio of the joint actions."""
    actor = team(distribution, count)
    old, reference = freeze(actor), drifted(freeze(actor), 0.1)
    state = torch.eye(STATES)[0]
    action, chance = actions(distribution, old, state)
    state = state.expand(len(action), STATES)
    advantage = (action.double() @ torch.randn(count)) ** 2
    batch = batch_of(old, state, action, advantage)
    drifted(actor, 0.02)
    loss = loss_of(kind, actor, reference=reference, ref_kl_coef=COEF, ref_kl_estimator=estimator)
    out = loss(batch.copy())
    found = gradient((chance * (out["loss_objective"] + out["loss_kl_ref"])).sum(), actor)
    ratio = (joint(actor, state, action) - joint(old, state, action)).exp()
    kl_ref, kl_old = (team_kl(*pair, state) for pair in ((actor, reference), (old, actor)))
    penalty = BETA * kl_old if kind is KLPENPPOLoss else 0.0
    true = (chance * (ratio * advantage - penalty - COEF * kl_ref)).sum()
    torch.testing.assert_close(found, -gradient(true, actor), rtol=1e-6, atol=1e-9)
    entropy = actor[0].module.at(state).entropy().sum(-1)
    torch.testing.assert_close(out["entropy"], entropy.mean())
    if kind is KLPENPPOLoss:
        torch.testing.assert_close(out["kl"].squeeze(-1), kl_old)
        for flat in (batch, batch.exclude("advantage"), batch.copy().set("advantage", advantage)):
            torch.testing.assert_close(loss.kl_old_new(flat), kl_old.mean())


@both
@pytest.mark.parametrize("given", ["advantage", "reward"])
def test_an_advantage_per_agent_has_torchrls_loss(kind, given: str) -> None:
    """Whether it is in the data, or TorchRL computes it from a reward per agent."""
    actor, count = team(Normal, 3), 5
    state = torch.randn(count, STATES)
    action = actor[0].module.at(state).sample()
    batch = batch_of(actor, state, action, torch.randn(count, 3))
    value = TensorDictModule(nn.Linear(STATES, 3), ["state"], ["each"])
    critic = nn.Sequential(value.module, nn.Unflatten(-1, (3, 1)))
    batch["value_target"] = torch.randn(count, 3, 1)
    done = torch.zeros(count, 3, 1, dtype=torch.bool)
    after = {"reward": torch.randn(count, 3, 1), "done": done, "terminated": done}
    batch["next"] = TensorDict({"state": torch.randn(count, STATES), **after}, [count])
    reference = drifted(freeze(actor), 0.5)
    drifted(actor, 0.1)
    if given == "reward":
        batch = batch.exclude("advantage", "value_target")
    outs = []
    for loss_class in (kind, getattr(torchrl.objectives, kind.__name__)):
        more = {"reference": reference, "ref_kl_coef": COEF} if loss_class is kind else {}
        loss = loss_class(actor, ValueOperator(critic, in_keys=["state"]), functional=False, **more)
        outs.append(loss(batch.copy()))
    for key in ("loss_objective", "loss_critic", "entropy"):
        torch.testing.assert_close(outs[0][key], outs[1][key])
    kl = team_kl(actor, reference, state).mean() / 3
    torch.testing.assert_close(outs[0]["kl_ref"], kl)


@both
def test_an_advantage_without_its_last_dimension_is_refused(kind) -> None:
    actor, state = team(Categorical, 2), torch.eye(STATES)
    batch = batch_of(actor, state, torch.zeros(3, 2, dtype=torch.long), torch.randn(3))
    batch["advantage"] = batch["advantage"].squeeze(-1)
    with pytest.raises(ValueError, match=r"outer\s+product.*advantage.unsqueeze"):
        loss_of(kind, actor)(batch)
