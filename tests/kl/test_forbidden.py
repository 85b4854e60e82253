"""A reference that forbids an action that the policy allows with a probability that rounds to 0."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, OneHotCategorical
from torchrl.modules import MaskedCategorical

from klrl.base.errors import NonFiniteError
from klrl.control.policy.distributions import Categorical as Family
from klrl.control.policy.distributions import MultiCategorical
from klrl.kl import exact_kl
from klrl.kl.divergences import over_actions
from klrl.kl.from_logits import Other, log_probs_and_kls
from klrl.kl.measure import mean_kl
from klrl.train.scores import mean_over_states

OFF = -torch.inf
#: Two rows: in the first one forbids an action that rounds to 0 in the other; in the second both
#: forbid it.
SMALL = torch.tensor([[0.3, -400.0, 0.0, -1.0], [0.3, OFF, 0.0, -1.0]])
FORBIDS = torch.tensor([[0.1, OFF, 0.4, 0.0], [0.1, OFF, 0.4, 0.0]])
KEPT = [0, 2, 3]
FINITE = (
    (
        SMALL[1, KEPT].softmax(-1)
        * (SMALL[1, KEPT].log_softmax(-1) - FORBIDS[1, KEPT].log_softmax(-1))
    )
    .sum()
    .item()
)


def of_torch(kind, **given):
    return lambda p, q: exact_kl(*(kind(logits=x, **given) for x in (p, q)))


def of_logits(p: Tensor, q: Tensor) -> Tensor:
    return log_probs_and_kls(p, torch.zeros(2, dtype=torch.long), [Other(q, 1.0, ("reverse",))], 1)[
        2
    ]


def of_heads(p: Tensor, q: Tensor) -> Tensor:
    """The action in the second of two heads."""
    heads = MultiCategorical((2, 4))
    both = [{"logits": torch.cat([torch.zeros(2, 2), x], 1)} for x in (p, q)]
    return heads.kl(*both)


#: name -> KL(p || q) [2] of logits p and q [2, 4].
KLS = {
    "over_actions": lambda p, q: over_actions("reverse", p.log_softmax(-1), q.log_softmax(-1)),
    "forward": lambda p, q: over_actions("forward", q.log_softmax(-1), p.log_softmax(-1)),
    "from_logits": of_logits,
    "control": lambda p, q: Family().kl({"logits": p}, {"logits": q}),
    "control, forward": lambda p, q: Family().divergence("forward", {"logits": q}, {"logits": p}),
    "heads": of_heads,
    "Categorical": of_torch(Categorical),
    "OneHotCategorical": of_torch(OneHotCategorical),
    "MaskedCategorical": of_torch(MaskedCategorical, mask=torch.ones(2, 4, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", KLS)
def test_the_kl_is_infinite_and_no_gradient_is_nan(name: str) -> None:
    p, q = SMALL.clone().requires_grad_(), FORBIDS.clone()
    found = KLS[name](p, q)
    assert found.tolist() == [math.inf, pytest.approx(FINITE, rel=1e-5)]
    found.where(torch.tensor([False, True]), 0.0).sum().backward()
    assert p.grad is not None
    few = SMALL[:, KEPT].clone().requires_grad_()
    over_actions("reverse", few.log_softmax(-1), FORBIDS[:, KEPT].log_softmax(-1))[1].backward()
    assert few.grad is not None
    torch.testing.assert_close(p.grad[:, KEPT], few.grad)
    assert not p.grad[:, 1].any()


@pytest.mark.parametrize("name", ["js", "tv"])
def test_a_bounded_divergence_is_that_of_the_other_actions(name: str) -> None:
    p, q = SMALL.clone().requires_grad_(), FORBIDS
    found = over_actions(name, p.log_softmax(-1), q.log_softmax(-1))
    found.sum().backward()
    few = [x[0, KEPT].log_softmax(-1) for x in (SMALL, FORBIDS)]
    assert found.tolist() == pytest.approx([over_actions(name, *few).item()] * 2, rel=1e-5)
    assert p.grad is not None
    assert p.grad.isfinite().all()


def test_a_bit() -> None:
    """P(1) is exp(-400), which rounds to 0; in the second row 0."""
    p = torch.tensor([-400.0, OFF], requires_grad=True)
    found = exact_kl(Bernoulli(logits=p), Bernoulli(logits=torch.tensor([OFF, OFF])))
    assert found.tolist() == [math.inf, 0.0]
    found[1].backward()
    assert p.grad is not None
    assert p.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("direction", "says"),
    [
        (0, "kl/ref/exact is inf: the reference forbids what the policy allows; raise kl.coef"),
        (1, "kl/ref/forward is inf: the policy forbids what the reference allows; raise kl.coef"),
    ],
)
def test_a_run_that_stops_says_who_forbids(direction: int, says: str) -> None:
    kls = [torch.ones(2), torch.ones(2)]
    kls[direction] = torch.tensor([1.0, math.inf])
    with pytest.raises(NonFiniteError, match=says):
        mean_kl(*kls, torch.zeros(2))


def test_an_evaluation_says_who_forbids() -> None:
    with pytest.raises(NonFiniteError, match="eval/kl_ref is inf: the reference forbids what the"):
        mean_over_states([np.array([1.0, math.inf])], "eval/kl_ref")
