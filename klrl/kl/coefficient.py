"""The coefficient of a KL: one number >= 0, in a buffer that is changed in place.

Arguments and attributes are named ``coef``, or ``coeff`` as an alias: TorchRL uses both names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


def coefficient(value: float | Tensor, name: str = "coef") -> Tensor:
    """Copy a coefficient, reward per nat, into a new tensor: float64 [], on the CPU."""
    if not isinstance(value, Real | Tensor):
        raise TypeError(f"{name}={value!r}: give a number >= 0")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name}=a tensor of shape {tuple(value.shape)}: give a number >= 0")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={number}: give a number >= 0")
    return torch.tensor(number, dtype=torch.float64)


class KeepsCoefficient(_Module):
    """Mixin for a module with a coefficient; assigning to the coefficient changes it in place.

    List the mixin before the other base class; call :meth:`keep_coefficient` in the constructor.
    """

    coefficient_name = "coef"  # name of the buffer; the alias has one more f

    def keep_coefficient(self, coef: float | Tensor, coeff: float | Tensor | None) -> None:
        """Register the coefficient as a buffer; ``coeff``, if given, replaces ``coef``."""
        value = coef if coeff is None else coeff
        self.register_buffer(self.coefficient_name, coefficient(value, self.coefficient_name))

    def __setattr__(self, name: str, value: Any) -> None:
        buffers = self.__dict__.get("_buffers") or {}
        held = self.coefficient_name
        if held in buffers and name in (held, held + "f"):
            buffers[held].copy_(coefficient(value, held))  # in place, since clones share the buffer
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == self.coefficient_name + "f":
            name = self.coefficient_name
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], *rest: bool) -> Self:
        """Move or cast the module, but do not round scalar buffers (the coefficient, beta).

        On a device without float64 (MPS) they become float32.
        """
        numbers = {name: x for name, x in self._buffers.items() if x is not None and x.ndim == 0}
        try:
            super()._apply(fn, *rest)
        except TypeError:
            numbers = {name: x.float() for name, x in numbers.items()}
            self._buffers.update(numbers)
            super()._apply(fn, *rest)
        for name, number in numbers.items():
            moved = self.get_buffer(name)
            if moved.dtype.itemsize < number.dtype.itemsize:
                self._buffers[name] = number.to(moved.device)
        return self
