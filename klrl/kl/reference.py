"""Who pi_ref is: a frozen policy with the observation normaliser of its own snapshot."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def freeze(actor: ModuleT, *, requires_grad: bool = False) -> ModuleT:
    """Copy a policy, parameters and buffers alike, and detach it from training.

    The copy holds its own observation normaliser, so it stays the function that it is now while
    the live policy's statistics move on.

    Args:
        actor: the policy to copy.
        requires_grad: keep the copy differentiable.
    """
    return deepcopy(actor).requires_grad_(requires_grad).eval()
