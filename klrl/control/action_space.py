"""The action spaces that are served, as flat vectors of one copy. Imports no torch.

A policy acts in one number (Discrete) or in a flat vector; the environment is given what its space
holds. The table:

    space          the policy's action            distribution
    Discrete       int64, counted from 0          a categorical
    MultiDiscrete  int64 [M], counted from 0      a product of categoricals
    MultiBinary    int64 [A], each 0 or 1         a product of Bernoullis
    Box of floats  float32 [A]                    a Gaussian
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from gymnasium import Space, spaces

from klrl.base.errors import ConfigError

#: The spaces whose distribution has logits, and its name.
FAMILIES: dict[type[Space], str] = {
    spaces.Discrete: "categorical",
    spaces.MultiDiscrete: "multi_categorical",
    spaces.MultiBinary: "bernoulli",
}

#: From the policy's actions [N] or [N, A] to those of the copies of the environment.
Convert = Callable[[np.ndarray], Iterable[object]]


def is_discrete(space: Space) -> bool:
    """Whether its actions are chosen among finitely many."""
    return type(space) in FAMILIES


def require_served(setting: str, space: Space) -> None:
    """Refuse an action space that no policy here acts in; ``setting`` names the environment."""
    if isinstance(space, spaces.Box):
        if not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(
                f"{setting}: its actions are {space.dtype} of shape {space.shape}; "
                "a Box of floats is served; wrap the environment"
            )
    elif not is_discrete(space):
        raise ConfigError(
            f"{setting}: its action space is {type(space).__name__}; "
            "Box, Discrete, MultiDiscrete and MultiBinary are served; wrap the environment"
        )


def kind_of(space: Space) -> object:
    """What two policies share that act alike: number of actions, numbers of them, or shape."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    return space.shape


def joint_actions(space: Space) -> int | None:
    """How many actions a product of categoricals or Bernoullis has; None for other spaces."""
    if isinstance(space, spaces.MultiDiscrete):
        return math.prod(map(int, space.nvec.reshape(-1)))
    if isinstance(space, spaces.MultiBinary):
        return 2 ** math.prod(space.shape)
    return None


def conversion(space: Space) -> Convert | None:
    """How an action gets the shape, the type and the first number of its space.

    None where it has them: a Discrete that starts at 0, a Box of one dimension.
    """
    shape, dtype = space.shape or (), space.dtype
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return None if start == 0 else lambda action: action + start
    if isinstance(space, spaces.Box):
        # Rows in a list: iterating over an array [N] would give numbers, not arrays of shape ().
        return None if len(shape) == 1 else lambda action: [x.reshape(shape) for x in action]
    first = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return lambda action: [(x.reshape(shape) + first).astype(dtype) for x in action]


def conversion_note(space: Space) -> str | None:
    """A line about actions that are not given to the environment as they are; None for others."""
    shown = " ".join(str(space).split())  # numpy breaks lines
    return None if conversion(space) is None else f"actions: {shown}, flat to the policy"
