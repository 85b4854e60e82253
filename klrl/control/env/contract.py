"""What klrl requires of an environment: its action space, and the results that it returns.

Imports no torch.

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
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from klrl.base.errors import ConfigError, in_one_line

#: Space with finitely many actions -> the name of its distribution.
FAMILIES: dict[type[Space], str] = {
    spaces.Discrete: "categorical",
    spaces.MultiDiscrete: "multi_categorical",
    spaces.MultiBinary: "bernoulli",
}

#: Converts the policy's actions [N] or [N, A] to one action for each copy of the environment.
Convert = Callable[[np.ndarray], Iterable[object]]


def wrappers_of(env: gymnasium.Env) -> Iterator[gymnasium.Wrapper]:
    """Yield an environment's wrappers, from the outermost inwards."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


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


def batch_conversion(space: Space) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that converts the policy's actions to one array [N, ...] of a space."""
    shape, first = space.shape or (), getattr(space, "start", 0)
    return lambda action: (action.reshape(-1, *shape) + first).astype(space.dtype)


def conversion_note(space: Space) -> str | None:
    """Describe the conversion of actions in a line for the user; None without a conversion."""
    shown = " ".join(str(space).split())  # numpy's text may have line breaks
    return None if conversion(space) is None else f"actions: {shown}, converted for the policy"


# ---------------------------------------------------------------------------------------- results

# Without these checks, numpy would broadcast a scalar to an observation, drop an imaginary part,
# and treat "no" as true.

#: Types of rewards and of flags that are accepted without further checks.
NUMBERS = (float, np.float64, np.float32, int)
FLAGS = (bool, np.bool_)
#: ``dtype.kind`` of numpy's real numbers: float, int, unsigned, bool.
REAL = "fiub"


class Misfit(Exception):
    """A result that violates Gymnasium's contract or the environment's spaces."""


def require_observation(
    observation: object,
    shape: Sequence[int],
    name: str = "observation",
    dtype: np.dtype | None = None,
) -> None:
    """Require an array, or nested lists, of real numbers in the space's shape.

    If the space's ``dtype`` has integers, refuse numbers that a cast would change.

    Raises:
        Misfit: ``observation`` is not such an array.
    """
    array = _array(name, observation)
    if array.shape != tuple(shape):
        raise Misfit(f"{name} has shape {array.shape}, but its space has shape {tuple(shape)}")
    if dtype is not None and dtype.kind != "f" and array.dtype != dtype:
        with np.errstate(invalid="ignore"):  # NaN
            wrong = array.astype(dtype) != array
        if wrong.any():
            told = f"{name} has {array[wrong][0]:g}, which its space's {dtype} cannot hold"
            raise Misfit(f"{told}; change one of them")


def require_picture(picture: object) -> np.ndarray:
    """Require an RGB picture, uint8 [height, width, 3].

    Raises:
        Misfit: ``picture`` is not such a picture.
    """
    array = _array("picture", picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise Misfit(f"picture is {array.dtype} {array.shape}, not uint8 (height, width, 3)")
    return array


def require_number(reward: object) -> float:
    """Convert a reward to a float; it must be a real number, or an array with one real number.

    Raises:
        Misfit: ``reward`` is anything else.
    """
    array = _array("reward", reward)
    if array.size != 1:
        raise Misfit(f"reward has shape {array.shape}; one number is expected")
    return float(array.item())


def require_flag(name: str, flag: object) -> bool:
    """Convert ``terminated`` or ``truncated`` to a bool; the flag must be a bool, 0 or 1.

    Raises:
        Misfit: ``flag`` is anything else.
    """
    array = np.asarray(flag)
    if array.size != 1 or array.dtype.kind not in REAL or array.item() not in (0, 1):
        raise Misfit(f"{name} is {_shown(flag)}; True or False is expected")
    return bool(array.item())


def fault(error: BaseException) -> str:
    """Describe an error in one line, with the file and line that raised it except for a Misfit."""
    if isinstance(error, Misfit):
        return str(error)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {in_one_line(error)} ({Path(at.filename).name}, line {at.lineno})"


def _array(name: str, value: object) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        raise Misfit(f"{name} is {_shown(value)}, not an array") from None
    if array.dtype.kind not in REAL:
        raise Misfit(f"{name} is {_shown(value)}; real numbers are expected")
    return array


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} of shape {value.shape}"
    return f"{value!r:.40} ({type(value).__name__})"
