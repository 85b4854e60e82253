"""Estimators against Schulman's table and enumeration; closed forms against integration."""

import math

import pytest
import torch
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    Normal,
    Uniform,
    kl_divergence,
)
from torchrl.modules import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    TanhNormal,
    TruncatedNormal,
)

from klrl.kl import estimate_kl, exact_kl
from klrl.kl.divergences import over_actions

DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("shift", "true", "stds", "k2_bias"),
    # Schulman (2020): std / true of k1, k2, k3 and the relative bias of k2, two unit Gaussians.
    [(0.1, 0.005, (20.0, 1.42, 1.42), 0.002), (1.0, 0.5, (2.0, 1.73, 1.70), 0.25)],
)
def test_schulmans_table(shift: float, true: float, stds: tuple, k2_bias: float) -> None:
    action = torch.linspace(-12, 12, 20_001, dtype=DOUBLE)
    log_prob, ref_log_prob = (Normal(loc, 1.0).log_prob(action) for loc in (0.0, shift))
    biases = {"k1": 0.0, "k2": k2_bias, "k3": 0.0}
    for name, std in zip(("k1", "k2", "k3"), stds, strict=True):
        kl = estimate_kl(log_prob, ref_log_prob, name)
        mean, square = (torch.trapezoid(log_prob.exp() * x, action) for x in (kl, kl**2))
        assert float((square - mean**2).sqrt() / true) == pytest.approx(std, rel=0.01)
        assert float(mean / true - 1) == pytest.approx(biases[name], abs=2e-3)


def test_k1_and_k3_are_unbiased_by_enumeration() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=DOUBLE)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=DOUBLE)
    true = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for name in ("k1", "k3"):
        assert float((p * estimate_kl(p.log(), q.log(), name)).sum()) == pytest.approx(true)
    assert float(exact_kl(Categorical(p), Categorical(q))) == pytest.approx(true)


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="k9"):
        estimate_kl(torch.zeros(2), torch.zeros(2), "k9")
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        estimate_kl(torch.zeros(2), torch.zeros(3))
    with pytest.raises(NotImplementedError, match="Independent.*Uniform"):
        exact_kl(Independent(Normal(0.0, 1.0), 0), Uniform(0.0, 1.0))
    with pytest.raises(NotImplementedError, match="TruncatedNormal"):
        exact_kl(*(TruncatedNormal(torch.zeros(1), torch.ones(1)) for _ in range(2)))


@pytest.mark.parametrize("name", ["reverse", "forward", "js", "tv"])
def test_bfloat16_has_the_kl_of_its_own_policies(name: str) -> None:
    """4096 tokens, KL 2e-4: sums in bfloat16 gave 6e-4, and a forward KL of -3e-3."""
    z = torch.randn(8, 4096)
    near = (z.bfloat16(), (z + 0.02 * torch.randn_like(z)).bfloat16())
    p, q = (x.log_softmax(-1) for x in near)
    true = over_actions(name, *(x.to(DOUBLE).log_softmax(-1) for x in (p, q)))
    found = over_actions(name, p, q)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to(DOUBLE), true, rtol=1e-3, atol=1e-6)
    if name == "reverse":
        dists = [Categorical(logits=x, validate_args=False) for x in near]
        true = kl_divergence(*(Categorical(logits=x.logits.to(DOUBLE)) for x in dists))
        torch.testing.assert_close(exact_kl(*dists).to(DOUBLE), true, rtol=1e-3, atol=1e-6)


def test_bfloat16_log_probs_are_compared_in_float32() -> None:
    """k3 of r = .0079: expm1 would round its r^2 / 2 = 3.1e-5 away."""
    log_prob = torch.tensor([-1.0]).bfloat16()
    ref_log_prob = torch.tensor([-1.0078125]).bfloat16()
    k3 = math.expm1(-0.0078125) + 0.0078125
    assert float(estimate_kl(log_prob, ref_log_prob, "k3")) == pytest.approx(k3, rel=1e-3)


@pytest.mark.parametrize("logit", [-110.0, -18.0, 0.0, 16.0, 110.0])
@pytest.mark.parametrize("ref_logit", [-110.0, -2.0, 17.0, 110.0])
def test_a_saturated_bernoulli_has_a_finite_kl(logit: float, ref_logit: float) -> None:
    """Torch's float32 KL is inf if the reference's logit is above 16.7 or below -88."""
    z = torch.tensor([logit], requires_grad=True)
    kl = exact_kl(Bernoulli(logits=z), Bernoulli(logits=torch.tensor([ref_logit])))
    kl.backward()
    # log p(1) = -log(1 + exp(-logit)), log p(0) = log p(1) - logit; dKL / dlogit = p(1) p(0) excess
    ones = [min(x, 0.0) - math.log1p(math.exp(-abs(x))) for x in (logit, ref_logit)]
    p, rest = math.exp(ones[0]), math.exp(ones[0] - logit)
    excess = logit - ref_logit
    true = ones[0] - ones[1] - rest * excess
    assert float(kl.detach()) == pytest.approx(true, rel=1e-5, abs=2e-7)
    assert float(z.grad) == pytest.approx(p * rest * excess, rel=1e-5, abs=2e-7)


def test_factors_are_compared_one_by_one() -> None:
    """Torch's KL of an Independent has a NaN gradient where both policies forbid an action."""
    z = torch.tensor([[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]], requires_grad=True)
    ref = torch.zeros(2, 3)
    allowed = torch.tensor([[True, True, False], [True, True, True]])
    dist, ref_dist = (
        Independent(Categorical(logits=x.masked_fill(~allowed, -torch.inf)), 1) for x in (z, ref)
    )
    kl = exact_kl(dist, ref_dist)
    kl.backward()
    leaf = z.detach().double().requires_grad_()
    rows = [leaf[0, :2].log_softmax(-1), leaf[1].log_softmax(-1)]
    true = sum((row.exp() * (row + math.log(len(row)))).sum() for row in rows)
    true.backward()
    assert kl.shape == ()
    assert float(kl.detach()) == pytest.approx(float(true.detach()))
    assert torch.allclose(z.grad.double(), leaf.grad, atol=1e-6)
    one = Independent(Normal(torch.zeros(2), 1.0), 1)
    many = Independent(Normal(torch.ones(3, 2), 1.0), 1)
    assert exact_kl(one, many).tolist() == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("kind", [MaskedCategorical, MaskedOneHotCategorical])
def test_categoricals_over_other_actions_are_refused(kind) -> None:
    """Of 4 actions, 0, 1 and 3 are allowed, given as indices."""
    z, allowed = torch.randn(4, dtype=DOUBLE), torch.tensor([0, 1, 3])
    p, q = (kind(logits=x, indices=allowed) for x in (z, torch.zeros(4, dtype=DOUBLE)))
    true = (z[allowed].softmax(-1) * (z[allowed].log_softmax(-1) + math.log(3))).sum()
    torch.testing.assert_close(exact_kl(p, q), true)
    for other in (kind(logits=z, indices=torch.tensor([0, 2, 3])), Categorical(logits=z[:3])):
        with pytest.raises(ValueError, match="different indices"):
            exact_kl(p, other)
    for one in (Categorical(logits=z), p):
        with pytest.raises(ValueError, match=r"categoricals of [34] and 1 actions"):
            exact_kl(one, Categorical(logits=torch.zeros(1)))


def test_tanh_normal_equals_integration_over_actions() -> None:
    def dist(loc: float, scale: float, high: float = 2.0) -> TanhNormal:
        loc_, scale_ = torch.tensor([loc], dtype=DOUBLE), torch.tensor([scale], dtype=DOUBLE)
        return TanhNormal(loc_, scale_, low=-2.0, high=high, event_dims=1, safe_tanh=False)

    p, q = dist(0.3, 0.6), dist(-0.2, 0.9)
    action = torch.linspace(-2, 2, 400_001, dtype=DOUBLE)[1:-1].unsqueeze(-1)
    log_p, log_q = p.log_prob(action), q.log_prob(action)
    integral = torch.trapezoid(log_p.exp() * (log_p - log_q), action.squeeze(-1))
    assert float(exact_kl(p, q)) == pytest.approx(float(integral), abs=1e-4)
    with pytest.raises(ValueError, match="different bounds"):
        exact_kl(p, dist(0.0, 1.0, high=3.0))
