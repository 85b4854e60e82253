"""The environment of a control job: it can be made, stepped and served."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError, first_line
from klrl.config import ActorConfig, Config, EnvConfig
from klrl.control.ray_machine import check_ray_machine
from klrl.runs.find import other_runs


def check_env(env: EnvConfig, actor: ActorConfig, overridden: frozenset[str]) -> None:
    """Make the environment and take a step; refuse what cannot be made, stepped or served."""
    import gymnasium

    _check_id(env.id)
    made = _make(env)
    space = made.action_space
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    _check_spaces(env.id, space, made.observation_space)
    _check_a_step(env, made)
    made.close()
    if actor.name in ("normal", "tanh_normal") and discrete:
        raise ConfigError(
            f"actor={actor.name}: the actions of env.id={env.id} are discrete; "
            "choose actor=categorical or actor=mlp"
        )
    if actor.name == "categorical" and not discrete:
        raise ConfigError(
            f"actor=categorical: the actions of env.id={env.id} are continuous; "
            "choose actor=normal, tanh_normal or mlp"
        )
    if not discrete:
        _check_bounds(env.id, actor, space)
    if discrete and "actor.init_std" in overridden:
        raise ConfigError(
            f"actor.init_std: nothing reads it here: env.id={env.id} has discrete actions; drop it"
        )


def policy_kind(env: EnvConfig, actor: ActorConfig) -> tuple[str, int, Any]:
    """(distribution, length of an observation, length of an action or number of actions)."""
    import gymnasium

    made = _make(env)
    discrete = isinstance(made.action_space, gymnasium.spaces.Discrete)
    auto = "categorical" if discrete else "normal"
    family = auto if actor.name == "mlp" else actor.name
    size = gymnasium.spaces.flatdim(made.observation_space)
    action = made.action_space.n if discrete else made.action_space.shape
    made.close()
    return family, size, action


def _check_spaces(env_id: str, action: Any, observation: Any) -> None:
    """Discrete actions, or a vector of floats; observations with a fixed flat size."""
    import gymnasium
    import numpy as np

    spaces = gymnasium.spaces
    if isinstance(action, spaces.Box):
        if len(action.shape) != 1 or not np.issubdtype(action.dtype, np.floating):
            raise ConfigError(
                f"env.id={env_id}: its actions are {action.dtype} of shape {action.shape}; "
                "vectors of floats are served; wrap the environment"
            )
    elif not isinstance(action, spaces.Discrete):
        raise ConfigError(
            f"env.id={env_id}: its action space is {type(action).__name__}; "
            "Box and Discrete are served"
        )
    if not isinstance(spaces.flatten_space(observation), spaces.Box):
        raise ConfigError(
            f"env.id={env_id}: its observation space is {type(observation).__name__}, which has no "
            "fixed size; wrap the environment"
        )


def _check_a_step(env: EnvConfig, made: Any) -> None:
    """An argument of the wrong type often fails at the first step only."""
    try:
        made.reset(seed=0)
        made.action_space.seed(0)
        made.step(made.action_space.sample())
    except Exception as error:  # someone else's code: it may raise anything
        raise ConfigError(
            f"env.id={env.id} with env.kwargs={env.kwargs}: its first step fails: "
            f"{first_line(error)}; mend env.kwargs"
        ) from error


def _check_bounds(env_id: str, actor: ActorConfig, space: Any) -> None:
    import numpy as np

    if actor.name == "tanh_normal" and not np.isfinite([space.low, space.high]).all():
        raise ConfigError(
            f"actor=tanh_normal: the actions of env.id={env_id} have no finite bounds to scale to; "
            "choose actor=normal"
        )


def _check_id(env_id: str) -> None:
    """Unknown ids get the nearest known one; ``module:id`` imports the module first."""
    import gymnasium

    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        foreign = isinstance(error, gymnasium.error.NamespaceNotFound)
        cutoff = 0.8 if foreign else 0.6
        close = difflib.get_close_matches(name, list(gymnasium.registry), n=1, cutoff=cutoff)
        if not close and not module:
            raise ConfigError(
                f"env.id={env_id}: not registered; an environment that a module registers is given "
                f"as env.id=module:{name}"
            ) from error
        hint = f"did you mean {close[0]}?" if close else "see gymnasium.registry for the known ids"
        reason = first_line(error).split(" Did you mean")[0].rstrip(".")
        raise ConfigError(f"env.id={env_id}: {reason}; {hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.id={env_id}: {error}; install it or mend its name") from error


def _make(env: EnvConfig) -> Any:
    import gymnasium

    from klrl.control.gym_make import make_gym

    try:
        return make_gym(env.id, env.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"env.id={env.id}: {first_line(error)}") from error
    except (TypeError, ValueError, AssertionError, ImportError, gymnasium.error.Error) as error:
        given = f" with env.kwargs={env.kwargs}" if env.kwargs else ""
        raise ConfigError(
            f"env.id={env.id}{given}: gymnasium.make refuses it: {first_line(error)}; "
            "mend env.id or env.kwargs"
        ) from error


def check_other_runs(config: Config) -> None:
    """Refuse a reference or a start whose policy is missing or of another kind, by its settings."""
    for setting, path, run in other_runs(config):
        _check_same_kind(setting, path, config, run)


def _check_same_kind(setting: str, path: str, config: Config, run: Path) -> None:
    """The other policy sees as many numbers and acts in the same way."""
    from klrl.runs.resume import stored_config

    other = stored_config(run)
    if not isinstance(other, Config):
        raise ConfigError(f"{setting}={path}: is a language run; give a control run")
    mine, theirs = (policy_kind(c.env, c.actor) for c in (config, other))
    names = ("action distribution", "observation", "action")
    for what, ours, others in zip(names, mine, theirs, strict=True):
        if ours != others:
            choice = f"choose actor={others}" if what == names[0] else "give another run"
            raise ConfigError(
                f"{setting}={path}: its {what} is {others}, this run's is {ours}; {choice}"
            )
    ours, others = (
        f"hidden={c.actor.hidden} activation={c.actor.activation} share_trunk={c.actor.share_trunk}"
        for c in (config, other)
    )
    if setting == "actor.init" and ours != others:
        raise ConfigError(f"{setting}={path}: its network is {others}; choose the same")


def check_job(config: Config, overridden: frozenset[str], *, resumed: bool) -> None:
    """The part of a control job; arguments as :func:`klrl.runs.machine.check_machine`."""
    if config.collector.elsewhere:
        check_ray_machine()
    check_env(config.env, config.actor, overridden)
    if not resumed:
        check_other_runs(config)
