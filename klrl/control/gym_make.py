"""How a Gymnasium environment is made, for the checks and for training alike. Imports no torch."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from klrl.base.errors import ConfigError, first_line


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


def make_wrapped(
    env_id: str,
    kwargs: Mapping[str, Any],
    wrappers: Sequence[Any] = (),
    keys: Sequence[str] | None = None,
) -> gymnasium.Env:
    """:func:`make_gym` in its wrappers, and of its observation the chosen keys.

    Args:
        env_id: an id, or ``module:id``.
        kwargs: arguments of the environment.
        wrappers: ``env.wrappers``, the innermost first; a name of ``gymnasium.wrappers``,
            ``module:name``, or a mapping of ``name`` and the wrapper's arguments.
        keys: ``env.observation_keys``, of a Dict; None for all.

    Raises:
        ConfigError: no such wrapper or key, or the wrapper does not take the environment.
        gymnasium.error.Error, TypeError, ValueError, ModuleNotFoundError: as :func:`make_gym`.
    """
    env = make_gym(env_id, kwargs)
    for wrapper in wrappers:
        env = _in_wrapper(env, wrapper)
    return env if keys is None else _with_keys(env_id, env, keys)


def _in_wrapper(env: gymnasium.Env, given: Any) -> gymnasium.Env:
    settings = {"name": given} if isinstance(given, str) else dict(given)
    name = settings.pop("name")
    # YAML has no tuples, and Gymnasium's wrappers ask for them.
    arguments = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    wrapper = _wrapper(name)
    try:
        return wrapper(env, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"env.wrappers: {name}: {first_line(error)}; pip install 'klrl[pixels]'"
        ) from error
    except Exception as error:  # someone else's code: it may raise anything
        raise ConfigError(
            f"env.wrappers: {name} refuses the environment or its arguments: "
            f"{first_line(error) or type(error).__name__}; fix env.wrappers"
        ) from error


def _wrapper(name: str) -> Any:
    module, _, attribute = name.rpartition(":")
    try:
        found = importlib.import_module(module or "gymnasium.wrappers")
        return getattr(found, attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.wrappers: {name}: {error}; install it or fix its name") from error
    except AttributeError as error:
        close = difflib.get_close_matches(attribute, dir(found), n=1)
        hint = f"did you mean {close[0]}?" if close else "see the names there"
        raise ConfigError(
            f"env.wrappers: {module or 'gymnasium.wrappers'} has no {attribute}; {hint}"
        ) from error


def _with_keys(env_id: str, env: gymnasium.Env, keys: Sequence[str]) -> gymnasium.Env:
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        raise ConfigError(
            f"env.observation_keys={list(keys)}: the observation of env.id={env_id} is a "
            f"{type(space).__name__}, which has no keys; drop it"
        )
    unknown = [key for key in keys if key not in space.spaces]
    if unknown or not keys:
        raise ConfigError(
            f"env.observation_keys={list(keys)}: the observation of env.id={env_id} has the keys "
            f"{', '.join(space.spaces)}; give some of them"
        )
    return gymnasium.wrappers.FilterObservation(env, list(keys))


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
