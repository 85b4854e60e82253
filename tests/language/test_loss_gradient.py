"""The gradients of the token losses, by enumeration of every response."""

from __future__ import annotations

import itertools

import pytest
import torch

from klrl.kl.charge import sampled_kl
from klrl.language import token_loss
from klrl.train.advantage import group_advantage

COEF = 0.3
ESTIMATORS = ("k1", "k2", "k3", "exact")
# A policy over V tokens and responses of length T, as a table: one row of logits per context.
V, T = 3, 3
PATHS = torch.tensor(list(itertools.product(range(V), repeat=T)))  # all 27 responses


def context(path):
    """The row of logits before each token: contexts are numbered by length, then base V."""
    first = (0, 1, 1 + V)
    return [first[t] + sum(path[i] * V ** (t - 1 - i) for i in range(t)) for t in range(T)]


CONTEXT = torch.tensor([context(path) for path in PATHS.tolist()])  # [27, T]
ALL = torch.ones(len(PATHS), T, dtype=torch.bool)
RETURNS = torch.tensor([float((path * torch.tensor([1, 2, 3])).sum() % 5) for path in PATHS])


def table(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + V + V * V, V, generator=generator, dtype=torch.float64)


def chosen(logits):
    """Log-prob of every token of every response [27, T]."""
    return logits.log_softmax(-1)[CONTEXT].gather(-1, PATHS[..., None]).squeeze(-1)


def exact_kl(logits, ref):
    p, q = logits.log_softmax(-1), ref.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)[CONTEXT]


def objective(logits, ref):
    """E[score - coef * sum_t KL_t], every response counted with its probability."""
    weight = chosen(logits).sum(1).exp()
    return (weight * (RETURNS - COEF * exact_kl(logits, ref).sum(1))).sum()


def expected_loss(theta, old, ref, estimator, placement, gain="surrogate"):
    """The mean over responses of pi_old of the loss that the parts make up."""
    lp, old_lp, ref_lp = chosen(theta), chosen(old), chosen(ref)
    kl = sampled_kl(estimator, old_lp, ref_lp, exact_kl(old, ref), ALL)
    advantage = RETURNS[:, None] - COEF * token_loss.kl_to_go(kl, ALL, placement)
    if gain == "clip":
        per_token = -token_loss.clip_gain(lp, old_lp, advantage, ALL, 0.2)
    else:
        per_token = -token_loss.klpen_gain(lp, old_lp, advantage, torch.zeros_like(lp), ALL, 0.0)
    if placement != "reward":
        exact = exact_kl(theta, ref)
        per_token = per_token + COEF * token_loss.reference_penalty(
            estimator, lp, old_lp, ref_lp, exact, ALL
        )
    return (old_lp.sum(1).exp() * per_token.sum(1)).sum()


@pytest.mark.parametrize("gain", ["surrogate", "clip"])
@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("exact", "split")])
def test_the_gradient_is_the_objectives(estimator, placement, gain) -> None:
    """On-policy: k1 in the reward and the exact KL split are exact (docs/kl.md)."""
    theta, ref = table(0).requires_grad_(), table(1)
    (truth_,) = torch.autograd.grad(-objective(theta, ref), theta)
    loss = expected_loss(theta, theta.detach(), ref, estimator, placement, gain)
    (found,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(found, truth_, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_losss_gradient_is_that_of_the_own_steps(estimator) -> None:
    """Off-policy: contexts of pi_old, KL(pi_theta || pi_ref) in each."""
    theta, old, ref = table(0).requires_grad_(), table(2), table(1)
    weight = chosen(old).sum(1).exp()
    (truth_,) = torch.autograd.grad((weight[:, None] * exact_kl(theta, ref)).sum(), theta)
    exact = exact_kl(theta, ref)
    penalty = token_loss.reference_penalty(
        estimator, chosen(theta), chosen(old), chosen(ref), exact, ALL
    )
    (found,) = torch.autograd.grad((weight[:, None] * penalty).sum(), theta)
    torch.testing.assert_close(found, truth_, atol=1e-12, rtol=1e-10)


def test_klpens_sampled_kl_is_that_of_old_and_new() -> None:
    """Value and gradient of KL(old||new), in every context of pi_old; never negative."""
    theta, old = table(0).requires_grad_(), table(2)
    weight = chosen(old).sum(1).exp()[:, None]
    kl = token_loss.sampled_kl_old(chosen(theta), chosen(old), ALL)
    assert (kl >= 0).all()
    expected = (weight * exact_kl(old, theta)).sum()
    torch.testing.assert_close((weight * kl).sum(), expected)
    found, truth_ = (torch.autograd.grad(x, theta)[0] for x in ((weight * kl).sum(), expected))
    torch.testing.assert_close(found, truth_, atol=1e-12, rtol=1e-10)


def test_group_advantages_gradient_is_the_objectives_on_average() -> None:
    """RLOO over all pairs of responses: unbiased, so E over pairs gives the exact gradient."""
    theta, ref = table(0).requires_grad_(), table(1)
    (truth_,) = torch.autograd.grad(-objective(theta, ref), theta)
    lp, log_ref = chosen(theta), chosen(ref)
    old, weight = lp.detach(), lp.detach().sum(1).exp()
    total = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(len(PATHS)), repeat=2):
        pair = torch.tensor([i, j])
        to_go = token_loss.kl_to_go((old - log_ref)[pair], ALL[pair], "reward")
        advantage = group_advantage(
            RETURNS[pair].double(), 2, "leave_one_out", to_go, ALL[pair], COEF
        ).squeeze(-1)
        gain = token_loss.clip_gain(lp[pair], old[pair], advantage, ALL[pair], 0.2)
        total = total - weight[i] * weight[j] * token_loss.sequence_mean(gain, ALL[pair])
    (found,) = torch.autograd.grad(total, theta)
    torch.testing.assert_close(found, truth_, atol=1e-12, rtol=1e-10)


def on_policy_error(estimator, placement):
    """Largest error of the gradient; ``loss`` is held to the own-step part that it claims."""
    theta, ref = table(0).requires_grad_(), table(1)
    weight = chosen(theta).sum(1).exp()
    own_steps = COEF * (weight.detach()[:, None] * exact_kl(theta, ref)).sum()
    charged = own_steps - (weight * RETURNS).sum()
    aim = charged if placement == "loss" else -objective(theta, ref)
    loss = expected_loss(theta, theta.detach(), ref, estimator, placement)
    found, truth_ = (torch.autograd.grad(x, theta)[0] for x in (loss, aim))
    return (found - truth_).abs().max().item()


@pytest.mark.parametrize(
    ("placement", "estimator"),
    [("reward", "k1"), ("split", "exact"), *(("loss", name) for name in ESTIMATORS)],
)
def test_the_pairs_that_pass_have_the_gradient_they_claim(placement, estimator) -> None:
    token_loss.check_placement(placement, estimator)
    assert on_policy_error(estimator, placement) < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3", "exact"])
def test_a_biased_pair_is_wrong_and_passes_on_request_only(estimator) -> None:
    with pytest.raises(ValueError, match="gradient is wrong"):
        token_loss.check_placement("reward", estimator)
    token_loss.check_placement("reward", estimator, allow_biased=True)
    assert on_policy_error(estimator, "reward") > 0.05
