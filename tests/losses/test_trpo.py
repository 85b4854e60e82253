"""TRPO's step against an explicit Fisher solve, and what else moves the policy."""

import math
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, jacrev

from klrl.control.policy.distributions import Bernoulli, Categorical, MultiCategorical, Normal
from klrl.control.run.step import pure_step
from klrl.losses.trpo import conjugate_gradients, fisher_product, natural_direction, take_step
from klrl.train.learner import Coefficients
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import exits, rows_of

DAMPING, FRAMES, STATES, ACTIONS = 0.05, 40, 3, 2


class Policy(torch.nn.Module):
    """Means of a small network, and one log of the spread per action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(STATES, 4), torch.nn.Tanh(), torch.nn.Linear(4, ACTIONS)
        )
        self.log_scale = torch.nn.Parameter(torch.tensor([-0.3, 0.2]))

    def forward(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        loc = self.net(states)
        return {"loc": loc, "scale": self.log_scale.exp().expand_as(loc)}


class Means(torch.nn.Linear):
    """Means of a linear policy; the spread is not trained."""

    def forward(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        loc = super().forward(states)
        return {"loc": loc, "scale": torch.full_like(loc, 0.5)}


class Logits(torch.nn.Linear):
    """A linear policy over discrete actions."""

    def forward(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": super().forward(states)}


def gaussian_fisher(new: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of (loc, scale) in a state, [N, 2 A, 2 A]: 1 / sigma^2 and 2 / sigma^2."""
    return torch.diag_embed(torch.cat([new["scale"] ** -2, 2 * new["scale"] ** -2], -1))


def categorical_fisher(new: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of logits, [N, K, K]: diag(p) - p p^T."""
    p = new["logits"].softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


@pytest.mark.parametrize(
    ("make", "family", "fisher"),
    [
        (Policy, Normal(), gaussian_fisher),
        (lambda: Means(STATES, ACTIONS), Normal(), gaussian_fisher),
        (lambda: Logits(STATES, 5), Categorical(), categorical_fisher),
    ],
    ids=["normal", "fixed spread", "categorical"],
)
def test_the_direction_is_that_of_an_explicit_fisher_solve(make, family, fisher) -> None:
    """F = mean over states of J^T M J, J the Jacobian of the network and M the outputs' Fisher."""
    torch.manual_seed(0)
    policy = make().double()
    states = torch.randn(FRAMES, STATES, dtype=torch.float64)
    names = [name for name, _ in policy.named_parameters()]
    parameters = list(policy.parameters())

    def flat_outputs(*values: torch.Tensor) -> torch.Tensor:
        new = functional_call(policy, dict(zip(names, values, strict=True)), (states,))
        return torch.cat([new[key] for key in family.param_keys], -1)

    new = policy(states)
    old = {key: value.detach() for key, value in new.items()}
    action = family.sample(old, 1)[0]
    loss = -(family.log_prob(new, action) * torch.randn(FRAMES, dtype=torch.float64)).mean()
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]
    )
    jacobian = torch.cat(
        [j.flatten(2) for j in jacrev(flat_outputs, tuple(range(len(names))))(*parameters)], -1
    )
    matrix = (jacobian.mT @ fisher(old) @ jacobian).mean(0).detach()
    damped = matrix + DAMPING * torch.eye(len(matrix)).double()
    expected = torch.linalg.solve(damped, -gradient / gradient.norm())

    def kl(at: list[torch.Tensor]) -> torch.Tensor:
        return family.kl(old, dict(zip(family.param_keys, at, strict=True))).mean()

    fisher_ = fisher_product(list(new.values()), kl, parameters)
    found, curvature = natural_direction(loss, fisher_, parameters, 200, DAMPING)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert float(curvature) == pytest.approx(float(expected @ matrix @ expected), rel=1e-6)
    take_step(parameters, found, curvature, 1e-6)
    assert family.kl(old, policy(states)).mean().item() == pytest.approx(1e-6, rel=1e-2)


@pytest.mark.parametrize("placement", ["loss", "split"])
def test_the_step_has_the_reference_kl_of_the_loss(settings, placement: str) -> None:
    """(F + damping)^-1 g of -E[w A] + coef scale / std(A) E[KL(pi||ref)], written out."""
    torch.manual_seed(0)
    kl = ("kl.estimator=exact", f"kl.placement={placement}", "kl.coef=3", "reference=initial")
    words = ("loss=trpo", f"loss.damping={DAMPING}", "loss.cg_steps=300", "env.reward_scale=0.5")
    parts = Training(settings(*words, *kl)).parts
    with torch.no_grad():
        for p in parts.reference.module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    rollout = parts.rollout(0)
    batch = rollout.collect()
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    asked = {}
    steps = parts.learner.steps
    natural, steps.natural_step = (
        steps.natural_step,
        lambda frames, coef, target: asked.update(frames=frames, coef=coef),
    )
    parts.learner.update(batch, 0.0, parts.kl.coef)
    rollout.close()
    assert asked["coef"] == 3
    policy, target = parts.agent.policy_net.double(), 1e-5
    frames = {k: v.double() if v.is_floating_point() else v for k, v in asked["frames"].items()}
    parameters = list(policy.parameters())
    loc, scale = policy.of_normalized(frames["observation"])
    new = torch.distributions.Normal(loc, scale)
    ref = torch.distributions.Normal(frames["ref_loc"], frames["ref_scale"])
    advantage, spread = frames["advantage"], frames["advantage"].std()
    ratio = (new.log_prob(frames["action"]).sum(-1) - frames["action_log_prob"]).exp()
    charged = torch.distributions.kl_divergence(new, ref).sum(-1)
    gain = ratio * (advantage - advantage.mean()) / spread - 3 * 0.5 / spread * charged

    def flat(output: torch.Tensor) -> torch.Tensor:
        grads = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])

    rows = torch.stack([flat(x) for x in torch.cat([loc, scale], -1).flatten()])
    jacobian = rows.view(len(loc), -1, rows.shape[-1])
    fisher = (jacobian.mT @ gaussian_fisher({"scale": scale.detach()}) @ jacobian).mean(0)
    gradient = flat(-gain.mean())
    damped = fisher + DAMPING * torch.eye(len(fisher)).double()
    direction = torch.linalg.solve(damped, -gradient / gradient.norm())
    expected = direction * (2 * target / (direction @ fisher @ direction)).sqrt()
    assert float(flat(charged.mean()).norm()) > 0.1 * float(flat((ratio * advantage).mean()).norm())
    before = torch.cat([p.detach().flatten() for p in parameters])
    natural(frames, asked["coef"], target)
    found = torch.cat([p.detach().flatten() for p in parameters]) - before
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_conjugate_gradients_solve_in_as_many_steps_as_dimensions() -> None:
    root = torch.randn(6, 6, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(6), torch.randn(6, dtype=torch.float64)
    found = conjugate_gradients(lambda v: matrix @ v, right, 6, tolerance=0.0)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-8, atol=1e-8)
    nothing = conjugate_gradients(lambda v: matrix @ v, torch.zeros(6), 6)
    assert not nothing.any(), "no gradient, no step"


@pytest.fixture
def made(settings):
    """A small job of loss=trpo, with a laid-out rollout."""
    torch.manual_seed(0)
    training = Training(settings("loss=trpo", "optim.lr=0.01", "kl=none"))
    rollout = training.parts.rollout(0)
    batch = rollout.collect()
    training.parts.charge_kl(batch)
    training.parts.estimate_advantage(batch)
    yield training.parts, training.parts.learner.steps.lay_out(batch)
    rollout.close()


@pytest.mark.parametrize("kind", ["paired", "apart", "pure"])
def test_gradient_steps_move_the_critic_alone(made, kind: str, monkeypatch) -> None:
    parts, frames = made
    steps = parts.learner.steps
    if kind == "apart":
        monkeypatch.setattr("klrl.control.run.step.can_be_paired", lambda _: False)
    if kind == "pure":
        monkeypatch.setattr("klrl.control.run.compiled.eager_step", pure_step)
    before, critic = (
        [p.detach().clone() for p in net.parameters()]
        for net in (parts.agent.policy_net, parts.agent.value_net)
    )
    steps.natural_step(frames, 0.0, 0.01)
    moved = [p.detach().clone() for p in steps.actor_parameters]
    assert not any(torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    for minibatch in steps.minibatches(frames):
        steps.step(minibatch, Coefficients(0.01, 0.0, 0.0))
    assert all(torch.equal(a, p) for a, p in zip(moved, steps.actor_parameters, strict=True))
    after = parts.agent.value_net.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(critic, after, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e-25])
@pytest.mark.parametrize("damping", [0.1, 1e3])
def test_small_gradients_and_large_damping_leave_the_step(scale: float, damping: float) -> None:
    """In float32: as of a policy near certainty; with F = 1e-6 the step is sqrt(2 dtarg / F)."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    fisher = fisher_product(
        [1 * parameter], lambda at: 1e-6 * at[0].square().sum() / 2, [parameter]
    )
    step = natural_direction((scale * parameter).sum(), fisher, [parameter], 10, damping)
    take_step([parameter], *step, 0.01)
    assert parameter.item() == pytest.approx(-math.sqrt(2 * 0.01 / 1e-6), rel=1e-4)


def test_a_row_is_of_the_policy_that_the_search_kept(settings) -> None:
    """With one step of conjugate gradients the search keeps another part of the step than all."""
    words = ("loss=trpo", "loss.damping=0", "loss.cg_steps=1", "loss.dtarg=2", "kl=none")
    parts = Training(settings(*words, "learner.epochs=1", "learner.minibatches=1")).parts
    rollout = parts.rollout(0)
    batch = rollout.collect()
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    learned = parts.learner.update(batch, 0.0)
    rollout.close()
    assert learned["learner/alpha"] != pytest.approx(1, abs=0.05)
    with torch.no_grad():
        frames = parts.learner.steps.lay_out(batch)
        outputs = parts.agent.policy_net.of_normalized(frames["observation"])
    new = dict(zip(parts.agent.family.param_keys, outputs, strict=True))
    entropy = torch.distributions.Normal(**new).entropy().sum(-1).mean()
    assert learned["policy/entropy"] == pytest.approx(float(entropy), rel=1e-5)


@pytest.mark.integration
def test_every_iteration_ends_at_the_target() -> None:
    words = ("loss=trpo", "loss.dtarg=0.02", "loss.dtarg_end=0.005", "frames=1024")
    assert exits(*QUICK, *words, "hydra.run.dir=run") == 0
    rows = rows_of(Path("run"))
    targets = [0.02 - 0.015 * i / len(rows) for i in range(len(rows))]
    assert [row["kl/old/target"] for row in rows] == pytest.approx(targets)
    for row, target in zip(rows, targets, strict=True):
        assert abs(math.log(row["kl/old/exact"] / target)) < 0.11


@pytest.mark.integration
@pytest.mark.parametrize("loss", ["klpen_held", "trpo"])
def test_a_target_per_action_counts_the_dimensions(loss: str) -> None:
    words = (f"loss={loss}", "loss.dtarg=0.004", "loss.dtarg_per=action", "optim.lr=0.01")
    assert exits(*QUICK, "env=hopper", *words, "hydra.run.dir=run") == 0
    for row in rows_of(Path("run")):
        assert row["kl/old/target"] == pytest.approx(3 * 0.004), "hopper has three joints"
        assert row["kl/old/exact"] == pytest.approx(3 * 0.004, rel=0.5)


def test_dimensions_are_those_that_a_kl_sums_over() -> None:
    loc = torch.zeros(5, 4)
    assert Normal().dimensions({"loc": loc, "scale": loc}) == 4
    assert Categorical().dimensions({"logits": torch.zeros(5, 7)}) == 1
    assert MultiCategorical([3, 4]).dimensions({"logits": torch.zeros(5, 7)}) == 2
    assert Bernoulli(7).dimensions({"logits": torch.zeros(5, 7)}) == 7
