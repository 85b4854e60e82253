"""The families against torch's and TorchRL's distributions, and against integration."""

import math

import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, kl_divergence
from torch.distributions import Normal as TorchNormal
from torchrl.modules import TanhNormal

from klrl.control.distributions import Categorical, Normal, TanhNormalFamily

DOUBLE = torch.float64
LOW, HIGH = torch.tensor([-2.0, 0.0], dtype=DOUBLE), torch.tensor([2.0, 5.0], dtype=DOUBLE)


def gaussian(seed: int, size: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randn(7, size, generator=generator, dtype=DOUBLE)
    return {"loc": loc, "scale": (0.3 * loc.roll(1)).exp()}


def logits(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"logits": 2 * torch.randn(7, 5, generator=generator, dtype=DOUBLE)}


def test_normal_is_torchs() -> None:
    p, q = gaussian(0), gaussian(1)
    torch_p, torch_q = (Independent(TorchNormal(**x), 1) for x in (p, q))
    action = torch_p.sample()
    torch.testing.assert_close(Normal().log_prob(p, action), torch_p.log_prob(action))
    torch.testing.assert_close(Normal().kl(p, q), kl_divergence(torch_p, torch_q))
    torch.testing.assert_close(Normal().entropy(p), torch_p.entropy())


def test_categorical_is_torchs() -> None:
    p, q = logits(0), logits(1)
    torch_p, torch_q = TorchCategorical(**p), TorchCategorical(**q)
    action = torch_p.sample()
    torch.testing.assert_close(Categorical().log_prob(p, action), torch_p.log_prob(action))
    torch.testing.assert_close(Categorical().kl(p, q), kl_divergence(torch_p, torch_q))
    torch.testing.assert_close(Categorical().entropy(p), torch_p.entropy())


def test_tanh_normal_is_torchrls() -> None:
    family, p, q = TanhNormalFamily(LOW, HIGH), gaussian(0), gaussian(1)
    u = Independent(TorchNormal(**p), 1).sample()
    action = LOW + (HIGH - LOW) * (u.tanh() + 1) / 2
    theirs = TanhNormal(**p, low=LOW, high=HIGH, event_dims=1)
    torch.testing.assert_close(family.log_prob(p, u), theirs.log_prob(action), rtol=1e-6, atol=1e-6)
    bases = [Independent(TorchNormal(**x), 1) for x in (p, q)]
    torch.testing.assert_close(family.kl(p, q), kl_divergence(*bases))


def test_tanh_normal_does_not_clamp_a_saturated_action() -> None:
    """At loc 9, u = 9: log N(0) - log(1 - tanh(9)^2) in exact arithmetic."""
    family = TanhNormalFamily(torch.tensor([-1.0]), torch.tensor([1.0]))
    params = {"loc": torch.tensor([9.0]), "scale": torch.tensor([1e-9])}
    expected = -0.5 * math.log(2 * math.pi) - math.log(1e-9) - math.log(1 / math.cosh(9.0) ** 2)
    got = float(family.log_prob(params, torch.tensor([9.0])))
    assert got == pytest.approx(expected, abs=1e-4)
    inverted = TanhNormal(**params, event_dims=1).log_prob(torch.tensor([9.0]).tanh())
    assert abs(float(inverted) - expected) > 1, "TorchRL's inverse is exact now: drop pre_tanh"


def test_tanh_normal_entropy_is_minus_the_integral_of_p_log_p() -> None:
    family = TanhNormalFamily(torch.tensor([-2.0], dtype=DOUBLE), torch.tensor([2.0], dtype=DOUBLE))
    params = {"loc": torch.tensor([0.4], dtype=DOUBLE), "scale": torch.tensor([0.7], dtype=DOUBLE)}
    action = torch.linspace(-2, 2, 400_001, dtype=DOUBLE)[1:-1]
    u = torch.atanh(action / 2).unsqueeze(-1)
    log_p = family.log_prob(params, u)
    exact = -torch.trapezoid(log_p.exp() * log_p, action)
    assert float(torch.trapezoid(log_p.exp(), action)) == pytest.approx(1.0, abs=1e-6)
    sampled = family.entropy(params, family.entropy_noise(params, 200_000))
    assert float(sampled) == pytest.approx(float(exact), abs=5e-3)


@pytest.mark.parametrize(
    "make", [lambda: (Normal(), gaussian(3)), lambda: (Categorical(), logits(3))]
)
def test_samples_follow_the_parameters(make) -> None:
    family, params = make()
    sample = family.sample(params, 200_000)
    mean_log_prob = family.log_prob(params, sample).mean(0)
    torch.testing.assert_close(mean_log_prob, -family.entropy(params), atol=0.02, rtol=0)
