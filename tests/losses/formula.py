"""Compares a loss with its formula: value and gradient, and the bias against the true gradient."""

import pytest
import torch


def check_formula(
    what: str, got: tuple[float, torch.Tensor], by_hand: tuple[float, torch.Tensor], true
) -> None:
    """``got`` and ``by_hand``: value and gradient; ``true``: the gradient on policy, printed."""
    (value, gradient), (expected, slope) = got, by_hand
    assert value == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-9)
    bias = float((gradient - true).norm() / true.norm())
    print(f"{what}: bias {bias:.3f} of the true gradient")
