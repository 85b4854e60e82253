"""Where the KL to the reference is charged, against enumeration of all actions and episodes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from klrl.control.distributions import Categorical
from klrl.control.score import score
from klrl.losses.functional import reference_kl
from klrl.losses.policy import ClipLoss, KLPENLoss
from tests.conftest import QUICK
from tests.losses.test_functional import CLIP, KLPEN
from tests.losses.test_policy import numbers
from tests.runs.commands import exits, rows_of

DOUBLE = torch.float64
ACTIONS = 7


def softmax_policies(distance: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of theta (differentiable), of the policy that sampled, and of the reference."""
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(ACTIONS, generator=generator, dtype=DOUBLE)
    old = ref + distance * torch.randn(ACTIONS, generator=generator, dtype=DOUBLE)
    theta = old + 0.3 * torch.randn(ACTIONS, generator=generator, dtype=DOUBLE)
    return theta.requires_grad_(), old, ref


def exact_gradient(theta: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    log_p, log_q = theta.log_softmax(0), ref.log_softmax(0)
    return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), theta)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [0.2, 1.0])
def test_the_losss_estimators_have_the_gradient_of_the_kl(estimator: str, distance: float) -> None:
    """In expectation over pi_old, at pi_theta != pi_old; k1 and k3 exactly, k2 through w."""
    theta, old, ref = softmax_policies(distance)
    old_log_p = old.log_softmax(0)
    per_action = reference_kl(estimator, theta.log_softmax(0), old_log_p, ref.log_softmax(0))
    gradient = torch.autograd.grad((old_log_p.exp() * per_action).sum(), theta)[0]
    torch.testing.assert_close(gradient, exact_gradient(theta, ref), rtol=1e-9, atol=1e-12)


def test_without_the_ratio_they_have_another_one() -> None:
    """What the ratio is for: k3 without it has the gradient of the forward KL, k1 none."""
    theta, _old, ref = softmax_policies(1.0)
    log_p, log_q = theta.log_softmax(0), ref.log_softmax(0)
    p = log_p.exp().detach()
    k1 = torch.autograd.grad((p * (log_p - log_q)).sum(), theta, retain_graph=True)[0]
    torch.testing.assert_close(k1, torch.zeros(ACTIONS, dtype=DOUBLE), atol=1e-12, rtol=0)
    k3 = (p * (torch.expm1(log_q - log_p) - (log_q - log_p))).sum()
    forward = (log_q.exp() * (log_q - log_p)).sum()
    gradients = [torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (k3, forward)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_the_loss_adds_coef_times_the_kl_of_its_minibatch(estimator: str) -> None:
    family, count = Categorical(), 200
    theta, old, ref = softmax_policies(0.8)
    action = torch.distributions.Categorical(logits=old).sample((count,))
    batch = {
        "action": action,
        "action_log_prob": old.log_softmax(0)[action],
        "logits": old.expand(count, -1),
        "ref_logits": ref.expand(count, -1),
        "ref_log_prob": ref.log_softmax(0)[action],
        "advantage": torch.zeros(count, dtype=DOUBLE),
        "value_target": torch.zeros(count, dtype=DOUBLE),
        "state_value": torch.zeros(count, dtype=DOUBLE),
    }
    config = replace(KLPEN, normalize_advantage=False, entropy_bonus=False, critic_coeff=0.0)
    params = {"logits": theta.expand(count, -1)}
    zero, coef = torch.zeros((), dtype=DOUBLE), torch.tensor(0.4, dtype=DOUBLE)
    loss = KLPENLoss(config, estimator)
    scored = score(loss, family, params, torch.zeros(count, dtype=DOUBLE), batch)
    terms = loss(scored, zero, coef)
    log_p, log_q = theta.log_softmax(0)[action], batch["ref_log_prob"]
    ratio = (log_p - batch["action_log_prob"]).exp()
    r = log_p - log_q
    by_hand = {
        "k1": ratio * r,
        "k2": ratio * r**2 / 2,
        "k3": ratio * ((-r).exp() - 1 + r),
        "exact": (theta.softmax(0) * (theta.log_softmax(0) - ref.log_softmax(0))).sum().expand(2),
    }[estimator].mean()
    torch.testing.assert_close(terms.total, 0.4 * by_hand)
    means = dict(zip(loss.measures, loss.measure(terms.measured).tolist(), strict=True))
    assert loss.weighted(means, 0.4)["loss/kl_ref"] == pytest.approx((0.4 * by_hand).item())


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
@pytest.mark.parametrize("kind", [ClipLoss, KLPENLoss])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_scaling_the_advantage_scales_all_of_the_loss(kind, estimator: str, masked: bool) -> None:
    """kl.coef is reward per nat: what multiplies the rewards multiplies the KL beside them.

    From advantages of mean 0 that were estimated from rewards times s, and divided by their spread
    s * std, the gradient is that of the rewards as they are, divided by std.
    """
    config = replace(KLPEN if kind is KLPENLoss else CLIP, entropy_bonus=False, critic_coeff=0.0)
    scale, coef, zero = 0.1, torch.tensor(0.4, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)
    plain = numbers(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    mask = mask if masked else torch.ones_like(mask)
    real = plain.advantage.detach()[mask]
    std, mean = torch.std_mean(real)
    plain = replace(plain, advantage=plain.advantage.detach() - mean, mask=mask if masked else None)

    def gradients(normalize: bool, factor: float, reward_scale: float) -> list[torch.Tensor]:
        settings = replace(config, normalize_advantage=normalize)
        loss = kind(settings, estimator, reward_scale=reward_scale)
        scored = replace(plain, advantage=factor * plain.advantage)
        total = loss(scored, zero, coef).total
        leaves = [plain.log_prob, plain.exact_ref]
        return list(torch.autograd.grad(total, leaves, materialize_grads=True))

    unscaled = gradients(normalize=False, factor=1.0, reward_scale=1.0)
    assert sum(float(g.abs().sum()) for g in unscaled) > 0.1
    scaled = gradients(normalize=False, factor=scale, reward_scale=scale)
    for one, other in zip(scaled, unscaled, strict=True):
        torch.testing.assert_close(one, scale * other, rtol=1e-12, atol=1e-15)
    normalized = gradients(normalize=True, factor=scale, reward_scale=scale)
    for one, other in zip(normalized, unscaled, strict=True):
        torch.testing.assert_close(one, other / std, rtol=1e-12, atol=1e-15)


@pytest.mark.integration
def test_a_runs_kl_in_the_loss_is_scaled_as_its_rewards_are() -> None:
    """At the first minibatch, whose policy does not depend on the scale, times the scale."""
    words = (*QUICK, "frames=64", "learner.epochs=1", "learner.minibatches=1", "kl.coef=0.4")
    placed = ("kl.placement=split", "kl.estimator=exact", "loss.normalize_advantage=false")
    other = ("reference=checkpoint", "reference.path=teacher")
    assert exits(*QUICK, "optim.lr=0.05", "hydra.run.dir=teacher") == 0
    found = {}
    for scale in (1.0, 0.1):
        given = (f"env.reward_scale={scale}", f"hydra.run.dir=run{scale}")
        assert exits(*words, *placed, *other, *given) == 0
        (row,) = rows_of(Path(f"run{scale}"))
        found[scale] = row["loss/kl_ref"]
        assert found[scale] == pytest.approx(0.4 * scale * row["kl/ref/exact"], rel=1e-4)
    assert found[1.0] > 1e-4


def test_split_has_the_gradient_of_the_whole_episodes_kl() -> None:
    """Exact KL of the own step in the loss, of all steps in the reward: enumerated 3-step chain.

    The own step's exact KL in the reward depends on the state alone, so its score-function
    gradient is 0 in expectation: charging it there as well is not counting it twice.
    """
    states, steps, coef = 3, 3, 0.7
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(steps, states, states, generator=generator, dtype=DOUBLE)
    theta = theta.requires_grad_()
    ref = theta.detach() + torch.randn(steps, states, states, generator=generator, dtype=DOUBLE)
    log_p, log_q = theta.log_softmax(-1), ref.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)  # [step, state]
    reward = torch.randn(steps, states, states, generator=generator, dtype=DOUBLE)
    objective = torch.zeros((), dtype=DOUBLE)
    surrogate = torch.zeros((), dtype=DOUBLE)
    for episode in itertools.product(range(states), repeat=steps):
        state, log_probs, kls, rewards = 0, [], [], []
        for step, action in enumerate(episode):  # the action is the next state
            log_probs.append(log_p[step, state, action])
            kls.append(kl[step, state])
            rewards.append(reward[step, state, action])
            state = action
        probability = torch.stack(log_probs).sum().exp()
        shaped = torch.stack(rewards) - coef * torch.stack(kls)
        objective = objective + probability * shaped.sum()
        to_go = shaped.detach().flip(0).cumsum(0).flip(0)
        own_step = -coef * torch.stack(kls).sum()
        gain = (torch.stack(log_probs) * to_go).sum() + own_step
        surrogate = surrogate + probability.detach() * gain
    gradients = [
        torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (objective, surrogate)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "in_reward", "in_loss"),
    [
        (["kl.placement=loss", "kl.estimator=exact"], False, True),
        (["kl.placement=loss", "kl.estimator=k3"], False, True),
        (["kl.placement=split", "kl.estimator=exact"], True, True),
        (["kl.placement=split", "kl.estimator=exact", "kl.apply=step"], True, True),
        (["kl.placement=reward", "kl.estimator=exact", "kl.allow_biased=true"], True, False),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
@pytest.mark.integration
def test_rows_tell_where_it_was_charged(words, in_reward, in_loss, tmp_path) -> None:
    exits(*QUICK, *words, "kl.coef=0.5", "optim.lr=0.01", "frames=192", "hydra.run.dir=run")
    rows = rows_of(tmp_path / "run")
    for row in rows:
        expected = 0.5 * row["kl/ref/exact"] if in_reward else 0.0
        assert row["kl/ref/penalty"] == pytest.approx(expected, abs=1e-6)
        assert row["reward/shaped"] == pytest.approx(row["reward/raw"] - expected, abs=1e-6)
        assert ("loss/kl_ref" in row) is in_loss
    assert rows[-1]["kl/ref/exact"] > 1e-4
    if in_loss:
        assert rows[-1]["loss/kl_ref"] > 0


@pytest.mark.integration
def test_a_kl_in_the_loss_holds_the_policy_back(tmp_path) -> None:
    words = ("kl.placement=loss", "kl.estimator=exact", "optim.lr=0.01", "frames=512")
    ends = []
    for coef in (0, 100):
        exits(*QUICK, *words, f"kl.coef={coef}", f"hydra.run.dir=c{coef}")
        ends.append(rows_of(tmp_path / f"c{coef}")[-1]["kl/ref/exact"])
    assert ends[1] < 0.2 * ends[0]
