"""Masks of whole numbers count as bools; a mask of another shape is refused."""

import pytest
import torch

from klrl.kl import estimate_kl, masked_mean
from klrl.kl.charge import sampled_kl, to_go
from klrl.kl.estimators import sequence_mean
from klrl.losses import terms

VALUE = torch.tensor([[1.0, 2.0, 100.0], [3.0, 100.0, 100.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
ZERO = torch.zeros(2, 3)


#: name -> (a masked function, what it gives by hand).
MASKED = {
    "masked_mean": (lambda m: masked_mean(VALUE, m), torch.tensor(2.0)),
    "sequence_mean": (lambda m: sequence_mean(VALUE, m), torch.tensor(3.0)),
    "masked_mean, of nothing": (lambda m: masked_mean(VALUE, 0 * m), torch.tensor(0.0)),
    "estimate_kl": (
        lambda m: estimate_kl(VALUE, ZERO, "k1", m),
        torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]),
    ),
    "estimate_kl, of 1 at r = 0": (
        lambda m: estimate_kl(VALUE, ZERO, lambda r: r + 1, m),
        torch.tensor([[2.0, 3.0, 0.0], [4.0, 0.0, 0.0]]),
    ),
    "sampled_kl": (
        lambda m: sampled_kl("exact", ZERO, ZERO, VALUE, m),
        torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]),
    ),
    "to_go": (lambda m: to_go(VALUE, m), torch.tensor([[3.0, 2.0, 0.0], [3.0, 0.0, 0.0]])),
    "loss, sum": (lambda m: terms.total(VALUE, m), torch.tensor(6.0)),
    "loss, normalized": (
        lambda m: terms.normalized(VALUE, m)[0],
        torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_any_type(name: str, dtype: torch.dtype) -> None:
    function, by_hand = MASKED[name]
    torch.testing.assert_close(function(MASK.to(dtype)), by_hand)


@pytest.mark.parametrize("shape", [(2, 1), (3,), (1, 3), (2, 3, 1), ()])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_another_shape_is_refused_with_both_shapes(name: str, shape: tuple) -> None:
    function, _ = MASKED[name]
    with pytest.raises(ValueError, match=r"mask \(.*\(2, 3\): shapes must match"):
        function(torch.ones(shape, dtype=torch.bool))
