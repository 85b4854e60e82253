"""The rule for shapes by hand; tests/transforms/test_shapes.py has it in environments."""

import pytest
import torch

from klrl.kl.shapes import add_heads, like_reward, reward_shape


@pytest.mark.parametrize(
    ("reward", "batch_dims", "shape"),
    [
        ((4, 1), 1, (4,)),
        ((4, 3, 1), 1, (4, 3)),
        ((4, 5, 1), 2, (4, 5)),
        ((1,), 0, ()),
        ((4, 1), 2, (4, 1)),
        ((4,), 1, (4,)),
    ],
)
def test_the_batch_shape_of_a_reward(reward, batch_dims, shape) -> None:
    assert reward_shape(torch.Size(reward), batch_dims) == shape


def test_what_is_beyond_the_reward_is_summed() -> None:
    value = torch.arange(24.0).view(2, 3, 4)
    per_agent = like_reward("x", value, torch.zeros(2, 3, 1), 1)
    assert per_agent.tolist() == [[6.0, 22.0, 38.0], [54.0, 70.0, 86.0]]
    assert like_reward("x", value, torch.zeros(2, 1), 1).tolist() == [66.0, 210.0]
    in_time = like_reward("x", value[..., 0], torch.zeros(2, 3, 1), 2)
    assert in_time.tolist() == [[0.0, 4.0, 8.0], [12.0, 16.0, 20.0]]


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 1)])
def test_both_shapes_are_named(shape) -> None:
    with pytest.raises(ValueError) as refused:
        like_reward("the log-prob", torch.zeros(shape), torch.zeros(2, 3, 1), 1)
    assert f"the log-prob has shape {shape}, the reward (2, 3, 1)" in str(refused.value)


def test_heads_add_over_the_dimensions_that_they_share() -> None:
    one = torch.ones
    assert add_heads([one(2, 3, 4), one(2, 3)]).tolist() == [[5.0] * 3] * 2
    assert add_heads([one(2, 4), one(2, 5)]).tolist() == [9.0, 9.0]
    assert add_heads([one(2), one(2, 3)]).tolist() == [4.0, 4.0]
    assert add_heads([one(2, 3)]).shape == (2, 3)
