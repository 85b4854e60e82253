"""The supported action spaces, and the conversion of the policy's actions. Imports no torch.

A policy's action is a number (Discrete) or a flat vector. The environment gets the action in the
shape, dtype and range of its space.

    space          the policy's action            distribution
    Discrete       int64, counted from 0          a categorical
    MultiDiscrete  int64 [M], counted from 0      a product of categoricals
    MultiBinary    int64 [A], each 0 or 1         a product of Bernoullis
    Box of floats  float32 [A]                    a Gaussian, plain or squashed by tanh
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from gymnasium import Space, spaces

from klrl.base.errors import ConfigError

#: Space with finitely many actions -> the name of its distribution.
FAMILIES: dict[type[Space], str] = {
    spaces.Discrete: "categorical",
    spaces.MultiDiscrete: "multi_categorical",
    spaces.MultiBinary: "bernoulli",
}

#: Converts the policy's actions [N] or [N, A] to one action for each copy of the environment.
Convert = Callable[[np.ndarray], Iterable[object]]


def is_discrete(space: Space) -> bool:
    """Whether a space has finitely many actions."""
    return type(space) in FAMILIES


def require_supported(setting: str, space: Space) -> None:
    """Refuse an unsupported action space; ``setting`` names the environment in the error."""
    if isinstance(space, spaces.Box):
        if not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(
                f"{setting}: its actions are {space.dtype} of shape {space.shape}; "
                "only a Box of floats is supported; wrap the environment"
            )
    elif not is_discrete(space):
        raise ConfigError(
            f"{setting}: its action space is {type(space).__name__}; "
            "only Box, Discrete, MultiDiscrete and MultiBinary are supported; wrap the environment"
        )


def action_signature(space: Space) -> object:
    """Return n of a Discrete, ``nvec`` of a MultiDiscrete, else the shape, to compare spaces."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    return space.shape


def joint_actions(space: Space) -> int | None:
    """Count the joint actions of a MultiDiscrete or MultiBinary space; None for other spaces."""
    if isinstance(space, spaces.MultiDiscrete):
        return math.prod(map(int, space.nvec.reshape(-1)))
    if isinstance(space, spaces.MultiBinary):
        return 2 ** math.prod(space.shape)
    return None


def conversion(space: Space) -> Convert | None:
    """Return a function that converts the policy's actions to actions of a space.

    Return None if nothing must be converted: for a Discrete that starts at 0, or a 1-D Box.
    """
    shape, dtype = space.shape or (), space.dtype
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return None if start == 0 else lambda action: action + start
    if isinstance(space, spaces.Box):
        # Not one array: for a Box of shape (), it would be [N] and yield numbers, not arrays.
        return None if len(shape) == 1 else lambda action: [x.reshape(shape) for x in action]
    first = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return lambda action: [(x.reshape(shape) + first).astype(dtype) for x in action]


def conversion_note(space: Space) -> str | None:
    """Describe the conversion of actions in a line for the user; None without a conversion."""
    shown = " ".join(str(space).split())  # numpy's text may have line breaks
    return None if conversion(space) is None else f"actions: {shown}, converted for the policy"
