"""What must hold of every KL, over random distributions (hypothesis)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution
from torch.distributions import Bernoulli, Categorical, Independent, Normal
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
)

from klrl.kl import estimate_kl, exact_kl, masked_mean

DOUBLE = torch.float64
seeds = st.integers(0, 2**31 - 1)
FEW = settings(max_examples=40, deadline=None)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def composite(seed: int, batch: int) -> CompositeDistribution:
    x = draw(seed, batch, 8)
    params = TensorDict(
        {
            "move": {"loc": x[:, :2], "scale": (0.3 * x[:, 2:4]).exp()},
            "press": {"logits": x[:, 4:7]},
            "hold": {"logits": x[:, 7:]},
        },
        [batch],
    )
    return CompositeDistribution(
        params,
        distribution_map={"move": IndependentNormal, "press": Categorical, "hold": Bernoulli},
    )


def allowed(batch: int) -> torch.Tensor:
    mask = torch.ones(batch, 5, dtype=torch.bool)
    mask[::2, 1] = False
    mask[1::2, 4] = False
    return mask


KINDS = {
    "Normal": lambda s, n: Normal(draw(s, n), (0.4 * draw(s + 1, n)).exp()),
    "IndependentNormal": lambda s, n: IndependentNormal(
        draw(s, n, 3), (0.4 * draw(s + 1, n, 3)).exp()
    ),
    "TanhNormal": lambda s, n: TanhNormal(
        draw(s, n, 2), (0.4 * draw(s + 1, n, 2)).exp(), low=-2.0, high=3.0, event_dims=1
    ),
    "Categorical": lambda s, n: Categorical(logits=draw(s, n, 5)),
    "OneHotCategorical": lambda s, n: OneHotCategorical(logits=draw(s, n, 5)),
    "MaskedCategorical": lambda s, n: MaskedCategorical(logits=draw(s, n, 5), mask=allowed(n)),
    "MaskedOneHotCategorical": lambda s, n: MaskedOneHotCategorical(
        logits=draw(s, n, 5), mask=allowed(n)
    ),
    "Bernoulli": lambda s, n: Bernoulli(logits=draw(s, n)),
    "CompositeDistribution": composite,
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


@each_kind
@FEW
@given(seed=seeds)
def test_never_negative_zero_for_equal_policies_and_of_batch_shape(make, seed: int) -> None:
    p, q = make(seed, 6), make(seed + 17, 6)
    kl = exact_kl(p, q)
    assert kl.shape == (6,)
    assert (kl > 0).all()
    torch.testing.assert_close(exact_kl(p, make(seed, 6)), torch.zeros(6, dtype=DOUBLE))


@pytest.mark.slow
@each_kind
def test_equals_the_mean_log_ratio_of_samples(make) -> None:
    """k1 over many samples of p, from the library's own log_prob: sign, direction and scale."""
    p, q = make(3, 4), make(20, 4)
    draws, count = 0.0, 4000
    for _ in range(count):
        action = p.sample()
        log_probs = [_total(d.log_prob(action), 4) for d in (p, q)]
        draws = draws + (log_probs[0] - log_probs[1])
    spread = float(exact_kl(p, q).max())
    torch.testing.assert_close(draws / count, exact_kl(p, q), atol=0.06 + 0.06 * spread, rtol=0.1)


def _total(log_prob: torch.Tensor | TensorDict, batch: int) -> torch.Tensor:
    if isinstance(log_prob, torch.Tensor):
        return log_prob
    parts = [v for k, v in log_prob.items(True, True) if str(k).endswith("log_prob")]
    return sum(part.reshape(batch, -1).sum(-1) for part in parts)


@FEW
@given(seed=seeds)
def test_dimensions_and_heads_add(seed: int) -> None:
    p, q = composite(seed, 5), composite(seed + 9, 5)
    heads = []
    for name in ("move", "press", "hold"):
        kl = exact_kl(p.dists[name], q.dists[name])
        heads.append(kl if kl.ndim == 1 else kl.sum(-1))
    torch.testing.assert_close(exact_kl(p, q), sum(heads))
    wide, narrow = KINDS["IndependentNormal"](seed, 5), KINDS["IndependentNormal"](seed + 5, 5)
    single = exact_kl(wide.base_dist, narrow.base_dist).sum(-1)
    torch.testing.assert_close(exact_kl(wide, narrow), single)


@FEW
@given(seed=seeds, pads=st.integers(0, 40), split=st.integers(1, 9))
def test_padding_and_batch_splits_change_nothing(seed: int, pads: int, split: int) -> None:
    log_prob, ref = draw(seed, 10) - 2, draw(seed + 1, 10) - 2
    junk = torch.full((pads,), -torch.inf, dtype=DOUBLE)
    mask = torch.cat([torch.ones(10), torch.zeros(pads)]).bool()
    for name in ("k1", "k2", "k3"):
        plain = estimate_kl(log_prob, ref, name)
        padded = estimate_kl(torch.cat([log_prob, junk]), torch.cat([ref, junk]), name, mask)
        assert float(masked_mean(padded, mask)) == pytest.approx(float(plain.mean()), abs=1e-6)
        assert float(padded[10:].abs().sum()) == 0.0
        parts = [
            estimate_kl(a, b, name)
            for a, b in zip(log_prob.split(split), ref.split(split), strict=True)
        ]
        torch.testing.assert_close(torch.cat(parts), plain)
    assert float(masked_mean(padded, torch.zeros_like(mask))) == 0.0


def test_padding_never_reaches_the_gradient() -> None:
    log_prob = torch.tensor([-1.0, -torch.inf, torch.nan], dtype=DOUBLE, requires_grad=True)
    mask = torch.tensor([True, False, False])
    kl = estimate_kl(log_prob, torch.full((3,), -2.0, dtype=DOUBLE), "k3", mask)
    masked_mean(kl, mask).backward()
    torch.testing.assert_close(
        log_prob.grad, torch.tensor([1 - torch.exp(torch.tensor(-1.0)), 0, 0], dtype=DOUBLE)
    )


def test_a_forbidden_action_never_reaches_the_gradient() -> None:
    logits = draw(0, 2, 5).requires_grad_()
    ref = MaskedCategorical(logits=draw(1, 2, 5), mask=allowed(2))
    exact_kl(MaskedCategorical(logits=logits, mask=allowed(2)), ref).sum().backward()
    assert logits.grad.isfinite().all()
    assert float(logits.grad[0, 1]) == 0.0
    assert logits.grad.abs().sum() > 0


def test_different_heads_are_refused() -> None:
    params = TensorDict({"a": {"logits": torch.zeros(2, 3)}}, [2])
    one = CompositeDistribution(params, distribution_map={"a": Categorical})
    with pytest.raises(ValueError, match="heads"):
        exact_kl(one, composite(0, 2))
    with pytest.raises(ValueError, match="mask"):
        estimate_kl(torch.zeros(3), torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="Categorical.*Independent"):
        exact_kl(Categorical(logits=torch.zeros(2)), Independent(Normal(0.0, 1.0), 0))
