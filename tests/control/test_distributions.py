"""The families against torch's and TorchRL's distributions, and against integration."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, kl_divergence
from torch.distributions import Normal as TorchNormal
from torchrl.modules import TanhNormal

from klrl.control.policy.distributions import (
    Bernoulli,
    Categorical,
    MultiCategorical,
    Normal,
    TanhNormalFamily,
)
from klrl.kl import exact_kl

DOUBLE = torch.float64
LOW, HIGH = torch.tensor([-2.0, 0.0], dtype=DOUBLE), torch.tensor([2.0, 5.0], dtype=DOUBLE)


def gaussian(seed: int, size: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randn(7, size, generator=generator, dtype=DOUBLE)
    return {"loc": loc, "scale": (0.3 * loc.roll(1)).exp()}


def logits(seed: int, size: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"logits": 2 * torch.randn(7, size, generator=generator, dtype=DOUBLE)}


COUNTS = (3, 2, 4)
#: family -> (it, parameters by seed, torch's factors of an action); one without a last dimension.
TORCHS = {
    "normal": (Normal(), gaussian, lambda p: [TorchNormal(*x) for x in columns(p)]),
    "categorical": (Categorical(), logits, lambda p: [TorchCategorical(**p)]),
    "multi_categorical": (
        MultiCategorical(COUNTS),
        lambda seed: logits(seed, sum(COUNTS)),
        lambda p: [TorchCategorical(logits=x) for x in p["logits"].split(COUNTS, -1)],
    ),
    "bernoulli": (
        Bernoulli(3),
        lambda seed: logits(seed, 3),
        lambda p: [TorchBernoulli(logits=x) for x in p["logits"].unbind(-1)],
    ),
}


def columns(params: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(params["loc"].unbind(-1), params["scale"].unbind(-1), strict=True)


@pytest.mark.parametrize("name", TORCHS)
def test_a_family_is_the_sum_over_torchs_factors(name: str) -> None:
    family, make, torchs = TORCHS[name]
    p, q = make(0), make(1)
    factors, others = torchs(p), torchs(q)
    drawn = [factor.sample() for factor in factors]
    action = drawn[0] if name == "categorical" else torch.stack(drawn, -1)
    action = action if name == "normal" else action.long()
    log_prob = sum(f.log_prob(x) for f, x in zip(factors, drawn, strict=True))
    kl = sum(kl_divergence(f, g) for f, g in zip(factors, others, strict=True))
    torch.testing.assert_close(family.log_prob(p, action), log_prob)
    torch.testing.assert_close(family.kl(p, q), kl)
    torch.testing.assert_close(family.divergence("forward", q, p), kl)
    torch.testing.assert_close(family.entropy(p), sum(f.entropy() for f in factors))
    ours = family.distribution(**p), family.distribution(**q)
    torch.testing.assert_close(ours[0].log_prob(action), log_prob)
    torch.testing.assert_close(exact_kl(*ours), kl)
    wide = {key: value.unsqueeze(1) for key, value in p.items()}
    many = action.unsqueeze(1).expand(7, 4, *action.shape[1:])
    torch.testing.assert_close(family.log_prob(wide, many), log_prob.unsqueeze(1).expand(7, 4))


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
