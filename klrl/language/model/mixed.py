"""Mixed precision: float32 weights that learn, bfloat16 arithmetic.

A bfloat16 number has 8 significant bits: near .01 its spacing is 6e-5, and an Adam step of 1e-6 is
rounded away. So weights, gradients and moments stay in float32, and matrix products take copies in
bfloat16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1). The residual stream, norms and
embeddings stay in float32, and so do log-softmaxes and KLs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from klrl.language.model.causal_lm import (
    COMPUTES_IN,
    backbone,
    model_device,
    model_dtype,
    unwrapped,
)


def compute_in_bfloat16(model: nn.Module) -> None:
    """Let a model of float32 weights compute in bfloat16 wherever it is called; its copies too.

    Args:
        model: a causal LM; its backbone and its head are changed in place.
    """
    unmixed: list[Any] = [backbone(model), unwrapped(model).get_output_embeddings()]
    for module in unmixed:
        # A bound method is copied with its module; a closure would go on calling this one.
        module.forward = MethodType(_in_bfloat16(type(module)), module)
    setattr(model, COMPUTES_IN, torch.bfloat16)


def _in_bfloat16(kind: type[nn.Module]) -> Any:
    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(model_device(self).type, torch.bfloat16):
            return kind.forward(self, *args, **kwargs)

    return forward


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Inside, a mixed model computes in float32, as its weights are; others are left alone."""
    network = unwrapped(model)
    mixed = vars(network).pop(COMPUTES_IN, None)
    if mixed is None:
        yield
        return
    parts: list[Any] = [backbone(model), network.get_output_embeddings()]
    forwards = [vars(part).pop("forward") for part in parts]
    try:
        yield
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
        setattr(network, COMPUTES_IN, mixed)


def weights_cast_once(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a trained weight gets its bfloat16 copy at its first use, not at every call.

    Autocast keeps its copies until its outermost context ends. This context is that outermost one;
    it is disabled, so it converts nothing itself. No weight may change inside.
    """
    return torch.autocast(device.type, enabled=False)


def in_low_precision(model: nn.Module) -> bool:
    """Whether rounding shows in its log-probs: it computes in fewer bits than float32."""
    return model_dtype(model).itemsize < torch.float32.itemsize
