"""TRPO's step: the natural gradient by conjugate gradients (Schulman et al. 2015, appendix C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import grad

#: v -> M v, of a matrix M.
Product = Callable[[Tensor], Tensor]


def natural_direction(
    loss: Tensor, fisher: Product, parameters: Sequence[Tensor], steps: int, damping: float
) -> tuple[Tensor, Tensor]:
    """Return (s, s^T F s) with (F + damping I) s = -gradient / |gradient|; s is flat [P].

    ``fisher`` is that of :func:`fisher_product`.
    """
    gradient = _flat(grad(loss, parameters, retain_graph=True, materialize_grads=True))
    toward = -gradient / gradient.norm().clamp_min(1e-30)  # else s^T F s may underflow to 0
    direction = conjugate_gradients(lambda v: fisher(v) + damping * v, toward, steps)
    return direction, direction @ fisher(direction)


def fisher_product(
    outputs: Sequence[Tensor],
    kl: Callable[[Sequence[Tensor]], Tensor],
    parameters: Sequence[Tensor],
) -> Product:
    """Return v [P] -> F v, F = J^T M J the policy's Fisher matrix (Martens 2020, section 8).

    J differentiates ``outputs``, the distribution's parameters, by the network's. M is the Hessian
    of ``kl``, the mean KL(old||new) as a function of new outputs, at new = old, where F is the
    Hessian by the network's parameters, too. A product needs no new forward pass. Outputs that do
    not depend on parameters, such as a fixed standard deviation, are constants.
    """
    at = [each.detach().requires_grad_(each.requires_grad) for each in outputs]
    moved, free = ([each for each in x if each.requires_grad] for x in (outputs, at))
    u = [torch.zeros_like(each, requires_grad=True) for each in moved]
    # J^T u is linear in u: its derivative by u, times v, is J v.
    pulled = _flat(grad(moved, parameters, u, create_graph=True, materialize_grads=True))
    slope = grad(kl(at), free, create_graph=True)

    def product(v: Tensor) -> Tensor:
        change = grad(pulled @ v, u, retain_graph=True)
        bent = grad(slope, free, change, retain_graph=True)
        return _flat(grad(moved, parameters, bent, retain_graph=True, materialize_grads=True))

    return product


def conjugate_gradients(
    product: Product, right: Tensor, steps: int, tolerance: float = 1e-20
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
