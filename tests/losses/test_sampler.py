"""Losses of responses that another policy sampled, against their formulas, in float64.

Every response of a small policy is enumerated; value and gradient are sums over all of them under
mu. The gradient is by hand: a coefficient of d log pi of each token, times onehot - softmax.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from klrl.config import ClipConfig, DPPOConfig, KLPENConfig
from klrl.losses.policy import ClipLoss, DPPOLoss, KLPENLoss, Scored
from klrl.losses.sampler import binary_kl
from tests.losses.formula import check_formula

V, LONGEST, END = 3, 3, 0
RESPONSES = [[*start, END] for n in range(LONGEST) for start in product(range(1, V), repeat=n)] + [
    [*each] for each in product(range(1, V), repeat=LONGEST)
]
PREFIXES = [p for n in range(LONGEST) for p in product(range(1, V), repeat=n)]
PLAIN = {"reduction": "sequence", "normalize_advantage": False, "entropy_bonus": False}
COEF = 0.3


def tables(staleness: int) -> dict[str, torch.Tensor]:
    """Logits [prefix, V] of theta, old, the reference, and mu: ``staleness`` steps before old."""
    generator = torch.Generator().manual_seed(3)
    ref, step, drift, old = torch.randn(4, len(PREFIXES), V, generator=generator).double()
    mu = old - 0.2 * staleness * drift
    return {"theta": old + 0.25 * step, "old": old, "mu": mu, "ref": ref}


def places(response: list[int]) -> list[tuple[int, int]]:
    """(prefix, token) of each token."""
    return [(PREFIXES.index((*response[:t],)), token) for t, token in enumerate(response)]


def advantage_of(response: list[int]) -> float:
    return math.sin(7.0 * sum((t + 1) * token for t, token in enumerate(response)) + 0.5)


def found(loss, logits) -> tuple[float, torch.Tensor]:
    """Expected loss under mu, and its gradient in theta's logits, by klrl."""
    theta = logits["theta"].clone().requires_grad_()
    logs = {name: each.log_softmax(-1) for name, each in {**logits, "theta": theta}.items()}
    m, p = logs["mu"], logs["theta"].detach()
    exact = {
        "tv_exact": (p.exp() - m.exp()).abs().sum(-1) / 2,
        "kl_exact": (m.exp() * (m - p)).sum(-1),
    }.get(getattr(loss.config, "measure", ""))
    total = torch.zeros((), dtype=torch.float64)
    for response in RESPONSES:
        at, tokens = map(list, zip(*places(response), strict=True))
        pad = [0] * (LONGEST - len(response))
        line = {k: each[[at + pad], [tokens + pad]] for k, each in logs.items()}
        zero = torch.zeros(1, LONGEST, dtype=torch.float64)
        scored = Scored(
            line["theta"],
            line["old"],
            zero + advantage_of(response),
            zero,
            zero,
            ref_log_prob=line["ref"],
            sampler_log_prob=line["mu"],
            sampler_divergence=None if exact is None else exact[at + pad][None],
            mask=torch.arange(LONGEST)[None] < len(response),
        )
        chance = float(logs["mu"][at, tokens].sum().exp())
        coefficients = (torch.zeros((), dtype=torch.float64), zero.new_tensor(COEF))
        total = total + chance * loss(scored, *coefficients).total
    (gradient,) = torch.autograd.grad(total, theta)
    return total.item(), gradient


def expected(rule, logits) -> tuple[float, torch.Tensor]:
    """The same by hand; ``rule`` gives a token's gain and its derivative in log pi."""
    logs = {name: each.log_softmax(-1).tolist() for name, each in logits.items()}
    soft = logits["theta"].softmax(-1)
    value, gradient = 0.0, torch.zeros_like(soft)
    for response in RESPONSES:
        at = places(response)
        lines = {name: [table[p][v] for p, v in at] for name, table in logs.items()}
        chance = math.exp(sum(lines["mu"]))
        for t, (prefix, token) in enumerate(at):
            gain, slope = rule(lines, t, advantage_of(response), logs, prefix)
            value -= chance * gain
            gradient[prefix] += chance * slope * soft[prefix]
            gradient[prefix, token] -= chance * slope
    return value, gradient


def clipped(anchor, weight=lambda d, t: 1.0):
    def rule(lines, t, a, logs, prefix):
        ratio = math.exp(lines["theta"][t] - lines[anchor][t])
        bounded = min(max(ratio, 0.8), 1.2)
        w = weight([o - m for o, m in zip(lines["old"], lines["mu"], strict=True)], t)
        if ratio * a <= bounded * a:
            return w * ratio * a, w * ratio * a
        return w * bounded * a, 0.0

    return rule


def within(x: float, low: float, high: float) -> float:
    return x if low <= x <= high else 0.0


WEIGHTS = {
    "truncate": lambda d, t: min(math.exp(d[t]), 2.0),
    "mask": lambda d, t: within(math.exp(d[t]), 0.5, 5.0),
    "mask_response": lambda d, t: within(math.exp(sum(d)), 0.0, 3.0),
    "mask_geometric": lambda d, t: (
        math.exp(d[t]) if 0.99 <= math.exp(sum(d) / len(d)) <= 1.01 else 0.0
    ),
}
SHARP = {  # limits that bind on this problem
    "truncate": ({"sampler_cap": 1.1}, lambda d, t: min(math.exp(d[t]), 1.1)),
    "mask": (
        {"sampler_low": 0.9, "sampler_high": 1.05},
        lambda d, t: within(math.exp(d[t]), 0.9, 1.05),
    ),
    "mask_response": ({"sampler_cap": 1.02}, lambda d, t: within(math.exp(sum(d)), 0, 1.02)),
    "mask_geometric": (
        {"sampler_low": 0.9, "sampler_high": 1.2},
        lambda d, t: math.exp(d[t]) if 0.9 <= math.exp(sum(d) / len(d)) <= 1.2 else 0.0,
    ),
}


def dppo(measure, delta, coef):
    def rule(lines, t, a, logs, prefix):
        theta, mu = lines["theta"][t], lines["mu"][t]
        p, m, log_q = math.exp(theta), math.exp(mu), theta - mu
        pairs = [
            (math.exp(x), math.exp(y))
            for x, y in zip(logs["theta"][prefix], logs["mu"][prefix], strict=True)
        ]
        if measure == "tv":
            stop = (a > 0 and p - m > delta) or (a < 0 and m - p > delta)
        else:
            far = {
                "kl": m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p)),
                "tv_exact": sum(abs(x - y) for x, y in pairs) / 2,
                "kl_exact": sum(y * math.log(y / x) for x, y in pairs),
            }[measure]
            stop = far > delta and ((a > 0 and p > m) or (a < 0 and p < m))
        gain = 0.0 if stop else p / m * a
        return gain - coef * log_q**2, gain - 2 * coef * log_q

    return rule


def with_k3(rule):
    """COEF q k3 of the reference in the loss, with the gradient through q."""

    def both(lines, t, a, logs, prefix):
        gain, slope = rule(lines, t, a, logs, prefix)
        q = math.exp(lines["theta"][t] - lines["mu"][t])
        log_r = lines["theta"][t] - lines["ref"][t]
        k3 = math.exp(-log_r) - 1 + log_r
        return gain - COEF * q * k3, slope - COEF * q * (k3 + 1 - math.exp(-log_r))

    return both


def clip(anchor, **how):
    loss = ClipLoss(ClipConfig(**PLAIN, **how))
    loss.anchor = anchor
    return loss


CASES = {
    "old": lambda: (clip("old"), clipped("old")),
    "sampler": lambda: (clip("sampler"), clipped("mu")),
    **{
        f"default {name}": lambda name=name: (
            clip("old", sampler_weight=name),
            clipped("old", WEIGHTS[name]),
        )
        for name in WEIGHTS
    },
    **{
        name: lambda name=name: (
            clip("old", sampler_weight=name, **SHARP[name][0]),
            clipped("old", SHARP[name][1]),
        )
        for name in SHARP
    },
    **{
        f"dppo {measure}": lambda measure=measure, delta=delta: (
            DPPOLoss(DPPOConfig(**PLAIN, measure=measure, delta=delta, log2_coef=0.05)),
            dppo(measure, delta, 0.05),
        )
        for measure, delta in (("tv", 0.05), ("kl", 0.01), ("tv_exact", 0.08), ("kl_exact", 0.03))
    },
}


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula_summed_over_all_responses(name: str, staleness: int) -> None:
    loss, rule = CASES[name]()
    logits = tables(staleness)
    got = found(loss, logits)
    assert got[1].abs().max() > 1e-2 or name == "default mask_geometric"
    true = expected(lambda lines, t, a, *_: (a, a), {**logits, "mu": logits["theta"]})[1]
    check_formula(f"{name}, staleness {staleness}", got, expected(rule, logits), true)


@pytest.mark.parametrize("name", ["old", "sampler", "truncate", "dppo tv"])
def test_k3_in_the_loss_has_the_weight_of_mu_whatever_the_anchor(name: str) -> None:
    (loss, rule), logits = CASES[name](), tables(4)
    loss.reference_estimator = "k3"
    value, gradient = found(loss, logits)
    by_hand, slope = expected(with_k3(rule), logits)
    assert value == pytest.approx(by_hand, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-9)


def test_klpen_weights_its_surrogate_alone() -> None:
    loss = KLPENLoss(KLPENConfig(**PLAIN, sampler_weight="truncate"))
    one, zero = torch.ones(1, 2).double(), torch.zeros(1, 2).double()
    scored = Scored(zero, zero, one, 0.5 * one, zero, sampler_log_prob=zero - 0.3)
    gain = loss.gain(scored, scored.advantage, torch.tensor(2.0).double())
    torch.testing.assert_close(gain, (math.exp(0.3) - 1.0) * one)


def test_masked_tokens_are_counted() -> None:
    log_mu = torch.tensor([[-1.0, -2.0, -0.5]]).double()
    zero = torch.zeros(1, 3).double()
    scored = Scored(log_mu + torch.tensor([[0.5, -0.1, -0.4]]), log_mu, zero + 1, zero, zero)
    loss = DPPOLoss(DPPOConfig(**PLAIN, delta=0.1))
    assert loss.masked(scored, scored.advantage).tolist() == [[1, 0, 0]]
    assert loss.masked(scored, -scored.advantage).tolist() == [[0, 0, 1]]
    masking = clip("old", sampler_weight="mask")
    far = replace(scored, old_log_prob=log_mu + torch.tensor([[0.0, -0.8, 1.7]]))
    far = replace(far, sampler_log_prob=log_mu)
    assert masking.masked(far, far.advantage).tolist() == [[0, 1, 1]]
    assert clip("old", sampler_weight="truncate").masked(far, far.advantage) is None
    assert "loss/masked" in loss.measures
    assert "loss/masked" in masking.measures
    assert "loss/masked" not in clip("old").measures


def test_the_binary_kl_is_finite_at_certain_tokens() -> None:
    log_p = torch.tensor([0.0, 0.0, -200.0, -1e-9])
    log_m = torch.tensor([0.0, -1.0, 0.0, -0.5])
    far = binary_kl(log_p, log_m)
    assert far.isfinite().all()
    assert float(far[0]) == 0
    assert float(far[2]) > 5
