"""Check the results that a Gymnasium environment returns.

Without checks, numpy would broadcast a scalar to an observation, drop an imaginary part, and treat
"no" as true.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from klrl.base.errors import in_one_line

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
