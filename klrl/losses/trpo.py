"""TRPO's step: the natural gradient by conjugate gradients (Schulman et al. 2015, appendix C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import grad


def natural_direction(
    loss: Tensor, kl: Tensor, parameters: Sequence[Tensor], steps: int, damping: float
) -> tuple[Tensor, Tensor]:
    """Return (s, s^T F s) with (F + damping I) s = -gradient / |gradient|; s is flat [P].

    ``kl``, a differentiable scalar, is the mean KL(old||new) at new = old. F is its Hessian, the
    policy's Fisher matrix; only products F v = grad(grad(KL)^T v) are computed.
    """
    gradient = _flat(grad(loss, parameters, retain_graph=True, materialize_grads=True))
    slope = _flat(grad(kl, parameters, create_graph=True, materialize_grads=True))

    def product(v: Tensor) -> Tensor:
        return _flat(grad(slope @ v, parameters, retain_graph=True, materialize_grads=True))

    toward = -gradient / gradient.norm().clamp_min(1e-30)  # else s^T F s may underflow to 0
    direction = conjugate_gradients(lambda v: product(v) + damping * v, toward, steps)
    return direction, direction @ product(direction)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, steps: int, tolerance: float = 1e-20
) -> Tensor:
    """Solve M x = ``right`` for positive definite M (Hestenes and Stiefel 1952).

    ``product(v)`` returns M v. Stops after ``steps`` products, or when the squared norm of
    ``right`` - M x is at most ``tolerance`` times that of ``right``.
    """
    x, residual, toward = torch.zeros_like(right), right.clone(), right.clone()
    square = residual @ residual
    end = tolerance * square
    for _ in range(steps):
        if square <= end:
            break
        image = product(toward)
        alpha = square / (toward @ image)
        x = x + alpha * toward
        residual = residual - alpha * image
        square, before = residual @ residual, square
        toward = residual + (square / before) * toward
    return x


@torch.no_grad()
def take_step(
    parameters: Sequence[Tensor], direction: Tensor, curvature: Tensor, target: float
) -> None:
    """Step by sqrt(2 target / curvature) * direction, so that KL is ``target`` to second order."""
    if curvature > 0:
        scaled = (2 * target / curvature).sqrt() * direction
        for p, part in zip(parameters, scaled.split([p.numel() for p in parameters]), strict=True):
            p.add_(part.view_as(p))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])
