"""How a Gymnasium environment is made, for the checks and for training alike. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import gymnasium


def make_gym(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    """``gymnasium.make``, with MuJoCo's warnings in Python's logging.

    Raises:
        gymnasium.error.Error, TypeError, ValueError: as ``gymnasium.make``.
    """
    if "mujoco" in str(gymnasium.spec(env_id.rpartition(":")[2]).entry_point):
        _route_mujoco_warnings()
    return gymnasium.make(env_id, **kwargs)


def _route_mujoco_warnings() -> None:
    """MuJoCo appends warnings to MUJOCO_LOG.TXT in the working folder unless told otherwise."""
    try:
        import mujoco
    except ImportError:
        return  # gymnasium.make says what is missing, and how to install it
    mujoco.set_mju_user_warning(_log)


def _log(message: str) -> None:
    # MuJoCo 4 says so of Gymnasium's own half_cheetah.xml, at every start; nobody here can mend it.
    level = logging.DEBUG if "is deprecated and will be removed" in message else logging.WARNING
    logging.getLogger("mujoco").log(level, message)
