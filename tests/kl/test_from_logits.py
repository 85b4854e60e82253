"""Log-probs and KLs from logits: against numpy, central differences, and plain autograd."""

import numpy as np
import pytest
import torch

from klrl.kl import from_logits
from klrl.kl.divergences import over_actions
from klrl.kl.from_logits import Other, log_probs_and_kls, tempered_log_softmax

ROWS, ACTIONS = 7, 5
BOTH = ("reverse", "forward")


def tables(count: int = 3) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, ACTIONS, dtype=torch.float64, generator=rng) for _ in range(count)]


def chosen() -> torch.Tensor:
    return torch.arange(ROWS) % ACTIONS


@pytest.fixture(params=[1, 10**6], ids=["row_by_row", "at_once"], autouse=True)
def piece(request, monkeypatch) -> None:
    monkeypatch.setattr(from_logits, "PIECE", request.param)


def softmax(z: torch.Tensor, temperature: float) -> np.ndarray:
    e = np.exp(z.numpy() / temperature)
    return e / e.sum(-1, keepdims=True)


def test_the_values_are_the_plain_sums() -> None:
    z, a, b = tables()
    found = log_probs_and_kls(z, chosen(), [Other(a, 1.0, BOTH), Other(b, 0.6, ("forward",))], 0.7)
    p, q, r = softmax(z, 0.7), softmax(a, 1.0), softmax(b, 0.6)
    rows = np.arange(ROWS), chosen().numpy()
    expected = [
        np.log(p[rows]),
        np.log(q[rows]),
        (p * np.log(p / q)).sum(-1),
        (q * np.log(q / p)).sum(-1),
        np.log(r[rows]),
        (r * np.log(r / p)).sum(-1),
    ]
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-12)


def test_the_gradient_is_that_of_central_differences() -> None:
    z, a, b = tables()
    z.requires_grad_()
    others = [Other(a, 1.0, BOTH), Other(b, 0.6, ("forward",))]
    differentiable = [0, 2, 3, 5]

    def values(z: torch.Tensor) -> torch.Tensor:
        return log_probs_and_kls(z, chosen(), others, 0.7)[differentiable]

    assert torch.autograd.gradcheck(values, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_fewer_bits_the_gradient_is_autograds(dtype) -> None:
    """Of bfloat16 logits to their rounding, once; the arithmetic is float32."""
    z, a, b = (table.to(dtype) for table in tables())
    weights = torch.arange(1.0, 6.0)
    z.requires_grad_()
    others = [Other(a, 0.7, ("reverse",)), Other(b, 0.7, ("forward",))]
    found = log_probs_and_kls(z, chosen(), others, 0.7)
    assert found.dtype == torch.float32
    (found.sum(1) * weights)[[0, 2, 4]].sum().backward()
    own, z.grad = z.grad, None
    p, q, r = (tempered_log_softmax(table, 0.7) for table in (z, a, b))
    of_tokens = p.gather(-1, chosen()[:, None]).sum()
    reverse, forward = (p.exp() * (p - q)).sum(), (r.exp() * (r - p)).sum()
    (of_tokens * weights[0] + reverse * weights[2] + forward * weights[4]).backward()
    assert own.dtype == dtype
    torch.testing.assert_close(own, z.grad)


@pytest.mark.parametrize("forbidding", ["pi", "q", "rows of either", "both"])
def test_what_pi_or_q_forbids_is_autograds(forbidding) -> None:
    z, a = tables(2)
    if forbidding != "q":
        z[0, 2] = -torch.inf
    if forbidding != "pi":
        a[0 if forbidding == "both" else 3, 2] = -torch.inf
    weights = torch.arange(1.0, 1 + ROWS, dtype=torch.float64)
    grads, values = [], []
    for of_logits in (log_probs_and_kls, by_autograd):
        leaf = z.clone().requires_grad_()
        found = of_logits(leaf, chosen(), [Other(a, 1.0, BOTH)], 0.7)
        finite = [torch.where(row.isfinite(), row, 0.0) for row in found]
        (finite[0] + 2 * finite[2] + 3 * finite[3]).mul(weights).sum().backward()
        values.append(found.detach())
        grads.append(leaf.grad)
    torch.testing.assert_close(*values)
    infinite = {"pi": (0, 1), "q": (1, 0), "rows of either": (1, 1), "both": (0, 0)}[forbidding]
    assert [int(values[0][i].isinf().sum()) for i in (2, 3)] == list(infinite)
    of_finite = values[0].isfinite().all(0)
    torch.testing.assert_close(grads[0][of_finite], grads[1][of_finite])
    assert grads[0][of_finite].isfinite().all()


def by_autograd(z, actions, others, temperature):
    log_p, rows = tempered_log_softmax(z, temperature), []
    for other in others:
        log_q = tempered_log_softmax(other.logits, other.temperature)
        kls = [over_actions(name, log_p, log_q) for name in other.names]
        rows += [log_q.gather(-1, actions[:, None]).squeeze(-1), *kls]
    return torch.stack([log_p.gather(-1, actions[:, None]).squeeze(-1), *rows])


def test_there_is_no_second_derivative() -> None:
    """It would be that of a constant: wrong in silence."""
    x, a = tables(2)
    x.requires_grad_()
    found = log_probs_and_kls(x.tanh(), chosen(), [Other(a, 1.0, BOTH)], 1.0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found[2].sum(), x, create_graph=True)


def test_what_has_no_gradient_here_is_refused() -> None:
    z, a = tables(2)
    with pytest.raises(ValueError, match=r"names=\('js',\): choose from reverse, forward"):
        log_probs_and_kls(z, chosen(), [Other(a, 1.0, ("js",))], 1.0)
    with pytest.raises(ValueError, match="require a gradient"):
        log_probs_and_kls(z, chosen(), [Other(a.requires_grad_(), 1.0, BOTH)], 1.0)


def test_autograd_keeps_the_logits_alone() -> None:
    z, a, b = tables()
    z.requires_grad_()
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() if tensor.shape == z.shape else 0)
        return tensor

    others = [Other(a, 0.7, ("reverse",)), Other(b, 0.7, ("forward",))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs_and_kls(z, chosen(), others, 0.7)
    assert sum(kept) == 3 * ROWS * ACTIONS
