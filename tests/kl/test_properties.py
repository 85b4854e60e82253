"""What must hold of every KL, over random distributions (hypothesis)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution
from torch.distributions import Bernoulli, Categorical, Normal
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


def test_padding_never_reaches_the_gradient() -> None:
    log_prob = torch.tensor([-1.0, -torch.inf, torch.nan], dtype=DOUBLE, requires_grad=True)
    mask = torch.tensor([True, False, False])
    kl = estimate_kl(log_prob, torch.full((3,), -2.0, dtype=DOUBLE), "k3", mask)
    masked_mean(kl, mask).backward()
    torch.testing.assert_close(
        log_prob.grad, torch.tensor([1 - torch.exp(torch.tensor(-1.0)), 0, 0], dtype=DOUBLE)
    )


def test_different_heads_are_refused() -> None:
    params = TensorDict({"a": {"logits": torch.zeros(2, 3)}}, [2])
    one = CompositeDistribution(params, distribution_map={"a": Categorical})
    with pytest.raises(ValueError, match="heads"):
        exact_kl(one, composite(0, 2))
