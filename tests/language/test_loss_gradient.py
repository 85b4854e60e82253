"""The gradients of the policy losses per token, by enumeration of every response."""

import itertools
from dataclasses import replace

import pytest
import torch

from klrl.config.placement import ESTIMATORS, PLACEMENTS, VERDICTS, Gradient
from klrl.kl.charge import sampled_kl
from klrl.kl.charge import to_go as to_go_sum
from klrl.kl.estimators import estimate_kl, sequence_mean
from klrl.language.run.advantage import group_advantage
from klrl.losses.policy import ClipLoss, KLPENLoss, Scored
from tests.losses.test_functional import CLIP, KLPEN

COEF = 0.3


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


def per_token(lp, old_lp, advantage, gain="surrogate", estimator=None, ref_lp=None, exact=None):
    """What the policy loss measures at every token, by name."""
    zero = torch.zeros((), dtype=torch.float64)
    kind, config = (ClipLoss, CLIP) if gain == "clip" else (KLPENLoss, KLPEN)
    loss = kind(replace(config, normalize_advantage=False, reduction="token"), estimator)
    none = torch.zeros_like(lp)
    scored = Scored(
        lp, old_lp, advantage, none, none, ref_log_prob=ref_lp, exact_ref=exact, mask=none == 0
    )
    return loss(scored, zero, zero).measured


def expected_loss(theta, old, ref, estimator, placement, gain="surrogate"):
    """The mean over responses of pi_old of the loss that the parts make up."""
    lp, old_lp, ref_lp = chosen(theta), chosen(old), chosen(ref)
    kl = sampled_kl(estimator, old_lp, ref_lp, exact_kl(old, ref), ALL)
    # A reward to go has the step's own KL in it: of a split, as control charges it.
    charged = "reward" if VERDICTS[placement][estimator] is Gradient.TWICE else placement
    advantage = RETURNS[:, None] - COEF * to_go_sum(kl, ALL, charged)
    measured = per_token(lp, old_lp, advantage, gain, estimator, ref_lp, exact_kl(theta, ref))
    loss = -measured["loss/objective"]
    if placement != "reward":
        loss = loss + COEF * measured["loss/kl_ref"]
    return (old_lp.sum(1).exp() * loss.sum(1)).sum()


PAIRS = list(itertools.product(PLACEMENTS, ESTIMATORS))
#: Whether the gradient is that of the objective, and that of each step's own KL alone.
RIGHT = {
    Gradient.EXACT: [True, False],
    Gradient.OWN_STEP: [False, True],
    Gradient.WRONG: [False, False],
    Gradient.TWICE: [False, False],
}


@pytest.mark.parametrize("gain", ["surrogate", "clip"])
@pytest.mark.parametrize(("placement", "estimator"), PAIRS)
def test_a_verdict_is_what_enumeration_finds(placement, estimator, gain) -> None:
    """On-policy, of every pair in the table of placements (docs/kl.md)."""
    theta, ref = table(0).requires_grad_(), table(1)
    weight = chosen(theta).sum(1).exp()
    own_steps = COEF * (weight.detach()[:, None] * exact_kl(theta, ref)).sum()
    loss = expected_loss(theta, theta.detach(), ref, estimator, placement, gain)
    aims = (loss, -objective(theta, ref), own_steps - (weight * RETURNS).sum())
    found, *truths = (torch.autograd.grad(x, theta, retain_graph=True)[0] for x in aims)
    errors = [float((found - truth).norm() / truth.norm()) for truth in truths]
    assert all(error < 1e-12 or error > 0.02 for error in errors), errors
    assert [error < 1e-12 for error in errors] == RIGHT[VERDICTS[placement][estimator]]


def test_klpens_sampled_kl_is_that_of_old_and_new() -> None:
    theta, old = table(0).requires_grad_(), table(2)
    weight = chosen(old).sum(1).exp()[:, None]
    kl = estimate_kl(chosen(old), chosen(theta), "k3", ALL)
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
        to_go = to_go_sum((old - log_ref)[pair], ALL[pair], "reward")
        advantage = group_advantage(
            RETURNS[pair].double(), 2, "leave_one_out", to_go, ALL[pair], COEF
        ).squeeze(-1)
        gain = per_token(lp[pair], old[pair], advantage, "clip")["loss/objective"]
        total = total - weight[i] * weight[j] * sequence_mean(gain, ALL[pair])
    (found,) = torch.autograd.grad(total, theta)
    torch.testing.assert_close(found, truth_, atol=1e-12, rtol=1e-10)
