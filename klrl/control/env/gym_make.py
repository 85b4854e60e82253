"""Make one copy of the environment, for checks and training. Imports no torch."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation

from klrl.base.errors import ConfigError, first_line
from klrl.config import CustomEnvConfig, EnvConfig, OwnPart
from klrl.config.own import PartError, config_errors, make_own
from klrl.config.own.find import arguments, import_target
from klrl.control.env.contract import wrappers_of

if TYPE_CHECKING:
    from klrl.control.env.library import Library

_WRAPPED = "name a gymnasium.Wrapper, or a function that returns a wrapped environment"


def make_one(
    config: EnvConfig, num_envs: int | None = None, device: str = "cpu"
) -> gymnasium.Env | Library:
    """Make one copy of the environment of ``config``, with its wrappers and observation keys.

    A function of the user's may return simulators that step together. It gets ``num_envs`` (by
    default the setting's) and ``device`` if it has arguments of these names.
    """
    env, keys = _bare(config, num_envs or config.num_envs, device), config.observation_keys
    if not isinstance(env, gymnasium.Env):
        env.check_settings(config, num_envs or config.num_envs)
        if keys is not None:
            env.select(_known(config, env.observation_space, keys))
        return env
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
    if keys is None:
        return env
    return FilterObservation(env, _known(config, env.observation_space, keys))


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


def _bare(config: EnvConfig, num_envs: int, device: str) -> gymnasium.Env | Library:
    if not isinstance(config, CustomEnvConfig):
        return make_gym(config.id, config.kwargs)

    given: dict[str, object] = {"num_envs": num_envs}
    if "device" in arguments("env", import_target("env", config))[0]:  # else torch is not needed
        from klrl.runs.machine import device_of

        given["device"] = str(device_of(device))
    make = partial(make_own, "env", config, given)
    made: Any = make()
    with config_errors("env", config):  # reading TorchRL's specs may fail
        if isinstance(made, gymnasium.vector.VectorEnv):
            from klrl.control.env.gym_vector import GymVector

            return GymVector(config.named, made)
        if "torchrl.envs" in sys.modules:  # else ``made`` cannot be a TorchRL environment
            from klrl.control.env.torchrl_batch import as_batch

            if (batch := as_batch(config.named, made, make, num_envs)) is not None:
                return batch
        if not isinstance(made, gymnasium.Env):
            raise PartError(
                f"made {type(made).__name__}; return a gymnasium.Env, a VectorEnv or an EnvBase"
            )
        for space in ("observation_space", "action_space"):
            if not isinstance(getattr(made, space, None), gymnasium.Space):
                raise PartError(f"has no {space}; set one in its __init__")
    return made


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


def _known(config: EnvConfig, space: gymnasium.Space, keys: Sequence[str]) -> list[str]:
    """Return the chosen keys of a Dict observation; refuse unknown ones."""
    setting = f"env.observation_keys={list(keys)}: the observation of {config.named}"
    if not isinstance(space, spaces.Dict):
        raise ConfigError(
            f"{setting} is a {type(space).__name__}, which has no keys; drop env.observation_keys"
        )
    if not keys or not set(keys) <= space.spaces.keys():
        raise ConfigError(
            f"{setting} has the keys {', '.join(space.spaces)}; give one or more of these"
        )
    return list(keys)


def _log(message: str) -> None:
    # Hide a deprecation warning that MuJoCo 4 gives whenever it loads Gymnasium's half_cheetah.xml.
    level = logging.DEBUG if "is deprecated and will be removed" in message else logging.WARNING
    logging.getLogger("mujoco").log(level, message)
