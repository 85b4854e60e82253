"""Make one copy of the environment, for checks and training. Imports no torch."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import gymnasium
from gymnasium import spaces

from klrl.base.errors import ConfigError, first_line
from klrl.config import CustomEnvConfig, EnvConfig, OwnPart
from klrl.config.own import PartError, config_errors, make_own

_WRAPPED = "name a gymnasium.Wrapper, or a function that returns a wrapped environment"


def make_one(config: EnvConfig) -> gymnasium.Env:
    """Make one copy of the environment of ``config``, with its wrappers and observation keys."""
    env = _bare(config)
    for i, part in enumerate(config.wrappers):
        env = _in_wrapper(env, f"env.wrappers[{i}]", part)
    for wrapper in wrappers_of(env):
        for name in ("observation", "reward"):
            kind = getattr(gymnasium.wrappers, f"Normalize{name.capitalize()}")
            if isinstance(wrapper, kind) and wrapper.update_running_mean:
                raise ConfigError(
                    f"{config.named}: its {kind.__name__} learns statistics that evaluations "
                    f"lack; drop it, and set env.normalize_{name}=true"
                )
    keys = config.observation_keys
    return env if keys is None else _with_keys(config.named, env, keys)


def wrappers_of(env: gymnasium.Env) -> Iterator[gymnasium.Wrapper]:
    """Yield an environment's wrappers, from the outermost inwards."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _in_wrapper(env: gymnasium.Env, setting: str, part: OwnPart) -> gymnasium.Env:
    if part.target.startswith("gymnasium."):
        # Gymnasium's wrappers require tuples, but YAML only has lists.
        args = {key: tuple(v) if isinstance(v, list) else v for key, v in part.args.items()}
        part = replace(part, args=args)
    try:
        wrapped: gymnasium.Env = make_own(setting, part, {"env": env}, gymnasium.Env, _WRAPPED)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, gymnasium.error.DependencyNotInstalled):
            raise ConfigError(
                f"{setting}: {part.target}: {first_line(cause)}; pip install 'klrl[pixels]'"
            ) from cause
        raise
    return wrapped


def _bare(config: EnvConfig) -> gymnasium.Env:
    if isinstance(config, CustomEnvConfig):
        made: object = make_own("env", config, {})
        with config_errors("env", config):  # reading TorchRL's specs may fail
            if "torchrl.envs" in sys.modules:  # else ``made`` cannot be a TorchRL environment
                from klrl.control.env.torchrl_env import as_gym

                made = as_gym(config.named, made)
            if not isinstance(made, gymnasium.Env):
                raise PartError(f"made {type(made).__name__}; return a gymnasium.Env or an EnvBase")
            for space in ("observation_space", "action_space"):
                if not isinstance(getattr(made, space, None), gymnasium.Space):
                    raise PartError(f"has no {space}; set one in its __init__")
        return made
    return make_gym(config.id, config.kwargs)


def make_gym(env_id: str, kwargs: Mapping[str, object]) -> gymnasium.Env:
    """Make an environment by its id or ``module:id``; log MuJoCo's warnings by Python's logging."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if "mujoco" in str(gymnasium.spec(name).entry_point):
        # By default MuJoCo appends warnings to MUJOCO_LOG.TXT in the working folder.
        with suppress(ImportError):  # gymnasium.make reports a missing package
            import mujoco

            mujoco.set_mju_user_warning(_log)
    return gymnasium.make(env_id, **kwargs)


def _with_keys(setting: str, env: gymnasium.Env, keys: Sequence[str]) -> gymnasium.Env:
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        raise ConfigError(
            f"env.observation_keys={list(keys)}: the observation of {setting} is a "
            f"{type(space).__name__}, which has no keys; drop env.observation_keys"
        )
    unknown = [key for key in keys if key not in space.spaces]
    if unknown or not keys:
        raise ConfigError(
            f"env.observation_keys={list(keys)}: the observation of {setting} has the keys "
            f"{', '.join(space.spaces)}; give one or more of these"
        )
    return gymnasium.wrappers.FilterObservation(env, list(keys))


def _log(message: str) -> None:
    # Hide a deprecation warning that MuJoCo 4 gives whenever it loads Gymnasium's half_cheetah.xml.
    level = logging.DEBUG if "is deprecated and will be removed" in message else logging.WARNING
    logging.getLogger("mujoco").log(level, message)
