"""How a Gymnasium environment is made, for the checks and for training alike. Imports no torch."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import gymnasium

from klrl.base.errors import ConfigError
from klrl.config import CustomEnvConfig, EnvConfig
from klrl.config.own import make_own, require


def make_one(config: EnvConfig) -> gymnasium.Env:
    """One copy of the environment that the env group describes, in its transforms.

    Raises:
        ConfigError: it or a transform is the user's own, and raises or is no Gymnasium environment.
        gymnasium.error.Error, TypeError, ValueError, ModuleNotFoundError: as :func:`make_gym`.
    """
    env = _bare(config)
    for i, part in enumerate(config.transforms):
        setting = f"env.transforms[{i}]"
        made = make_own(setting, part, {"env": env})
        what = "name a gymnasium.Wrapper, or a function that returns an environment in one"
        env = require(setting, part, made, gymnasium.Env, what)
    return env


def _bare(config: EnvConfig) -> gymnasium.Env:
    if isinstance(config, CustomEnvConfig):
        what = "return a gymnasium.Env; wrap another library's environment in one"
        made = require("env", config, make_own("env", config, {}), gymnasium.Env, what)
        for space in ("observation_space", "action_space"):
            if not isinstance(getattr(made, space, None), gymnasium.Space):
                raise ConfigError(
                    f"env.target={config.target}: has no {space}; set one in its __init__"
                )
        return made
    return make_gym(config.id, config.kwargs)


def make_gym(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    """``gymnasium.make``, with MuJoCo's warnings in Python's logging.

    Args:
        env_id: an id, or ``module:id`` for an environment that a module registers.
        kwargs: arguments of the environment.

    Raises:
        gymnasium.error.Error, TypeError, ValueError: as ``gymnasium.make``.
        ModuleNotFoundError: no such module.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if "mujoco" in str(gymnasium.spec(name).entry_point):
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
    # MuJoCo 4 says so of Gymnasium's own half_cheetah.xml, at every start; klrl cannot fix it.
    level = logging.DEBUG if "is deprecated and will be removed" in message else logging.WARNING
    logging.getLogger("mujoco").log(level, message)
