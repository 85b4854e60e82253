"""Forward KL and Jensen-Shannon: against sums and integrals in numpy's float64, and refusals."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from klrl.base.errors import NonFiniteError
from klrl.config.placement import DIVERGENCES
from klrl.control.policy.distributions import EXCLUDED, Categorical, Normal, TanhNormalFamily
from klrl.kl.divergences import over_actions
from klrl.kl.measure import in_unit, mean_charged
from tests.conftest import QUICK, marked
from tests.runs.commands import exits

DOUBLE = torch.float64
EXACT = ("kl.placement=split", "kl.estimator=exact")


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=DOUBLE)


def by_hand(name: str, p: np.ndarray, q: np.ndarray, weight: float = 1.0) -> float:
    """A sum over actions, or an integral over a grid; 0 log 0 = 0."""

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        some = a > 0
        return float((a[some] * np.log(a[some] / b[some])).sum() * weight)

    middle = (p + q) / 2
    return {
        "reverse": lambda: kl(p, q),
        "forward": lambda: kl(q, p),
        "js": lambda: (kl(p, middle) + kl(q, middle)) / 2,
    }[name]()


def softmax(logits: Tensor) -> np.ndarray:
    e = np.exp(logits.numpy())
    return e / e.sum(-1, keepdims=True)


def slopes(function, at: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of a number, by every entry."""
    found = torch.zeros_like(at)
    for i in range(at.numel()):
        move = torch.zeros_like(at)
        move.view(-1)[i] = step
        found.view(-1)[i] = (function(at + move) - function(at - move)) / (2 * step)
    return found


def gradient(function, at: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_a_categoricals_are_the_sums_over_its_actions(name: str, scale: float) -> None:
    ref = random(20, 30)
    logits = ref + random(20, 30, scale=scale)
    found = Categorical().divergence(name, {"logits": logits}, {"logits": ref})
    rows = zip(softmax(logits), softmax(ref), strict=True)
    expected = torch.tensor([by_hand(name, p, q) for p, q in rows], dtype=DOUBLE)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def own_forward(log_ratio: Tensor) -> Tensor:
    """u log u with u = pi_ref / pi."""
    return -log_ratio * torch.exp(-log_ratio)


def test_an_expectation_under_the_policy_is_blind_where_it_has_no_mass() -> None:
    """What docs/extending.md and the opening line of a run say of kl.divergence=custom."""
    p, q = (torch.tensor(x, dtype=DOUBLE).log() for x in ([1.0, 0.0], [0.5, 0.5]))
    assert float(over_actions("forward", p, q)) == math.inf
    assert float(over_actions(own_forward, p, q)) == pytest.approx(0.5 * math.log(0.5))  # below 0
    family, noise = Normal(), torch.randn(16, 1, dtype=DOUBLE)
    narrow, away = (
        {"loc": torch.tensor([at], dtype=DOUBLE), "scale": torch.tensor([0.1], dtype=DOUBLE)}
        for at in (0.0, 2.0)
    )
    assert float(family.divergence("forward", narrow, away)) == pytest.approx(200)
    assert abs(float(family.divergence(own_forward, narrow, away, noise))) < 1e-6


def test_a_probability_too_small_for_float32_counts_as_the_smallest() -> None:
    """p = (1, e^-140), q = (1/2, 1/2): f is E[k3] = KL(p || q) = log 2, with q - p = 1/2 of it."""

    def own_k3(log_ratio: Tensor) -> Tensor:
        return torch.expm1(-log_ratio) + log_ratio

    both = torch.full((1,), EXCLUDED)  # an action that both exclude adds nothing
    p, q = (torch.cat([torch.tensor(x), both]).log_softmax(-1) for x in ([140.0, 0.0], [0.0, 0.0]))
    for f in (own_k3, lambda x: torch.expm1(x) - x):
        assert math.isfinite(over_actions(f, p, q))
    found = gradient(lambda x: over_actions(own_k3, x.log_softmax(-1), q), p)
    assert float(over_actions(own_k3, p, q)) == pytest.approx(math.log(2), rel=1e-5)
    assert found.isfinite().all()
    near = torch.tensor([3.0, 0.0]).log_softmax(-1)
    assert over_actions(own_k3, near, q[:2]) == pytest.approx(
        float(over_actions("reverse", near, q[:2]))
    )


@pytest.mark.integration
@pytest.mark.parametrize("divergence", marked("slow", ("custom", "forward"), "custom"))
def test_a_run_says_so_when_it_opens(divergence, capsys) -> None:
    more = [f"kl.own_divergence.target={__name__}:own_forward"] if divergence == "custom" else []
    assert exits(*QUICK, *EXACT, f"kl.divergence={divergence}", *more, "hydra.run.dir=run") == 0
    said = "E_pi[f] ignores actions that the policy takes with" in capsys.readouterr().out
    assert said is (divergence == "custom")


def test_an_unknown_one_is_named() -> None:
    logits = random(3).log_softmax(-1)
    params = {"loc": random(2), "scale": random(2).exp()}
    for call in (
        lambda: over_actions("chi2", logits, logits),
        lambda: Normal().divergence("chi2", params, params),
    ):
        with pytest.raises(ValueError, match="divergence=chi2: choose one of reverse, forward, js"):
            call()


def gaussians(width: int, *batch: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return tuple(  # type: ignore[return-value]
        {"loc": random(*batch, width, scale=0.7), "scale": random(*batch, width, scale=0.3).exp()}
        for _ in range(2)
    )


def density(params: dict[str, Tensor], x: np.ndarray, dimension: int) -> np.ndarray:
    loc, scale = (float(params[key][dimension]) for key in ("loc", "scale"))
    return np.exp(-(((x - loc) / scale) ** 2) / 2) / (scale * math.sqrt(2 * math.pi))


def integral_1d(name: str, p, q, dimension: int = 0) -> float:
    """The trapezoidal rule, of exponential accuracy on a Gaussian."""
    x = np.linspace(-15, 15, 40_001)
    weight = float(x[1] - x[0])
    return by_hand(name, density(p, x, dimension), density(q, x, dimension), weight)


def integral_2d(name: str, p, q) -> float:
    x = np.linspace(-12, 12, 1201)
    weight = float(x[1] - x[0]) ** 2
    both = [np.outer(density(g, x, 0), density(g, x, 1)) for g in (p, q)]
    return by_hand(name, *both, weight)


def test_the_forward_kl_is_the_integral_under_the_reference() -> None:
    """Of both families, which differ by a bijection; KLs add over dimensions."""
    p, q = gaussians(3)
    expected = sum(integral_1d("forward", p, q, i) for i in range(3))
    other_way = sum(integral_1d("reverse", p, q, i) for i in range(3))
    assert abs(expected - other_way) > 0.05
    tanh = TanhNormalFamily(-torch.ones(3, dtype=DOUBLE), 2 * torch.ones(3, dtype=DOUBLE))
    for family in (Normal(), tanh):
        found = float(family.divergence("forward", p, q))
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_a_gradient_is_its_slope(kind: str, name: str) -> None:
    """Of a Gaussian's js that of its draws."""
    p, q = gaussians(3) if kind == "gaussian" else ({"logits": random(6)}, {"logits": random(6)})
    family = Normal() if kind == "gaussian" else Categorical()
    noise = torch.randn(64, 3, dtype=DOUBLE) if (kind, name) == ("gaussian", "js") else None
    for key in p:

        def value(x: Tensor, key: str = key) -> Tensor:
            return family.divergence(name, {**p, key: x}, q, noise)

        found = gradient(value, p[key])
        torch.testing.assert_close(found, slopes(value, p[key]), rtol=1e-5, atol=1e-9)


DRAWS = 200_000


@pytest.mark.parametrize("width", [1, 2])
def test_a_gaussian_js_is_unbiased_with_the_error_that_it_states(width: int) -> None:
    """Of the joint distribution: the js of two dimensions is not the sum of theirs."""
    p, q = gaussians(width)
    true = integral_1d("js", p, q) if width == 1 else integral_2d("js", p, q)
    family = Normal()
    noise = family.divergence_noise("js", p, DRAWS)
    assert noise is not None
    value, error = family.divergence("js", p, q, noise), family.divergence_error(p, q, noise)
    assert float(error) < 2e-3 * true + 1e-4
    assert abs(float(value) - true) < 4 * float(error)
    if width == 2:
        apart = sum(integral_1d("js", p, q, i) for i in range(2))
        assert abs(apart - true) > 8 * float(error)
    # The spread over repetitions with 16 draws each is the stated error.
    few = noise.view(-1, 16, width)
    wide = [{k: v.expand(len(few), -1) for k, v in g.items()} for g in (p, q)]
    spread = float(family.divergence("js", *wide, few).std())
    stated = float(family.divergence_error(*wide, few).square().mean().sqrt())
    assert stated == pytest.approx(spread, rel=0.05)


def test_a_tanh_normals_js_is_that_of_its_actions() -> None:
    """By an integral over the action, with the slope of the tanh in both densities."""
    p, q = gaussians(1)
    family = TanhNormalFamily(torch.tensor([-1.0], dtype=DOUBLE), torch.tensor([3.0], dtype=DOUBLE))
    u = torch.linspace(-9, 9, 80_001, dtype=DOUBLE)[:, None]
    action = family.action(u)[:, 0].numpy()
    both = [family.log_prob(g, u).exp().numpy() for g in (p, q)]
    middle = (both[0] + both[1]) / 2
    value = sum(0.5 * x * np.log(np.maximum(x, 1e-300) / middle) for x in both)
    true = float(np.trapezoid(value, action))
    noise = family.divergence_noise("js", p, DRAWS)
    assert noise is not None
    found, error = family.divergence("js", p, q, noise), family.divergence_error(p, q, noise)
    assert abs(float(found) - true) < 4 * float(error)
    assert float(found) == float(Normal().divergence("js", p, q, noise))


def test_only_a_gaussian_js_draws() -> None:
    """Another divergence uses up no random number, so that its runs are what they were."""
    p, _ = gaussians(2)
    logits = {"logits": random(3)}
    before = torch.get_rng_state()
    for name in DIVERGENCES:
        assert Categorical().divergence_noise(name, logits, 8) is None
        if name != "js":
            assert Normal().divergence_noise(name, p, 8) is None
    assert torch.equal(before, torch.get_rng_state())
    noise = Normal().divergence_noise("js", p, 8)
    assert noise is not None
    assert noise.shape == (8, 2)


def test_what_is_charged_is_measured_and_controlled_in_its_unit() -> None:
    kl = {"kl/ref/exact": torch.tensor(9.0), "kl/ref/exact_seq": torch.tensor(90.0)}
    assert (in_unit(kl, "token"), in_unit(kl, "sequence")) == (9.0, 90.0)
    charged = torch.tensor([[0.1, 0.2, math.nan], [0.3, math.nan, math.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    both = kl | mean_charged(charged, mask)
    assert in_unit(both, "token") == pytest.approx(0.2)
    assert in_unit(both, None) == pytest.approx(0.2)
    assert in_unit(both, "sequence") == pytest.approx(0.3)
    frames = mean_charged(torch.tensor([[0.1, 0.3]]), error=torch.tensor([[0.03, 0.04]]))
    assert float(frames["div/ref/charged"]) == pytest.approx(0.2)
    assert float(frames["div/ref/charged_error"]) == pytest.approx(0.025)  # sqrt(.03^2 + .04^2) / 2
    with pytest.raises(NonFiniteError, match=r"div/ref/charged is inf; raise kl\.coef"):
        mean_charged(torch.tensor([[math.inf]]))
