"""Checks the settings of a control job by its environment and the runs it reads. No torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from klrl.base.errors import ConfigError, first_line, with_line
from klrl.base.text import warn
from klrl.base.time_limit import TookTooLong, within
from klrl.config import (
    CONTROL,
    ActorConfig,
    CNNActorConfig,
    Config,
    CustomActorConfig,
    CustomEnvConfig,
    EnvConfig,
    LegacyKLConfig,
    RetrieveKLConfig,
)
from klrl.config.choices import choices_for
from klrl.config.own import config_errors
from klrl.config.placement import MOST_JOINT
from klrl.control.env.contract import (
    FAMILIES,
    Misfit,
    action_signature,
    is_discrete,
    joint_actions,
    require_flag,
    require_number,
    require_observation,
    require_supported,
)
from klrl.control.env.gym_make import make_one
from klrl.control.env.observation import (
    MASK,
    Layout,
    Packed,
    any_action,
    check_images,
    layout_of,
    require_actor,
)
from klrl.runs.find import other_runs

if TYPE_CHECKING:
    from klrl.control.env.library import Library


def check_job(config: Config, overridden: frozenset[str], *, resumed: bool) -> None:
    """Check a control job; arguments as in :func:`klrl.runs.machine.check_machine`."""
    made = check_env(config.env, config.actor, overridden, config.device)
    _check_device(config, made)
    space = made.action_space
    if isinstance(config.kl, RetrieveKLConfig) and config.kl.divergence in ("js", "custom"):
        # KLs of independent choices add up; other divergences are sums over all joint actions.
        count, divergence = joint_actions(space), config.kl.divergence
        if count is not None and count > MOST_JOINT:
            raise ConfigError(
                f"kl.divergence={divergence}: {config.env.named} has {count} joint actions, but "
                f"{divergence} is a sum over at most {MOST_JOINT}; choose kl.divergence=forward "
                "or reverse"
            )
    if not resumed:
        for setting, path, run in other_runs(config):
            from klrl.runs.resume import warn_edited  # imported here, since few jobs need it

            _check_same_kind(setting, path, config, run)
            warn_edited(setting, path, run)


def _check_device(config: Config, made: gymnasium.Env | Library) -> None:
    """Refuse simulators on a device with what steps them on the CPU."""
    if isinstance(made, gymnasium.Env) or made.device == "cpu":
        return
    on = f"{config.env.named} computes on {made.device}, where only klrl's loop steps it"
    if config.collector.name == "torchrl":
        raise ConfigError(f"collector=torchrl: {on}; choose collector=vector, or its CPU version")
    if isinstance(config.kl, LegacyKLConfig) and config.kl.apply == "step":
        raise ConfigError(f"kl.apply=step: {on}; choose kl.apply=rollout, or its CPU version")


def check_env(
    env: EnvConfig, actor: ActorConfig, overridden: frozenset[str], device: str = "cpu"
) -> gymnasium.Env | Library:
    """Make the environment and step it once; refuse it if this fails or the actor cannot act in it.

    Returns the environment, closed.
    """
    copy = make_checked(env, device)
    if isinstance(copy, gymnasium.Env):
        _check_pictures(env, copy)
    space = copy.action_space
    discrete = is_discrete(space)
    require_supported(env.named, space)
    layout = layout_of(env.named, copy.observation_space, space, env.action_mask, env.channels)
    require_actor(actor.name, layout)
    of_users = isinstance(actor, CustomActorConfig) and actor.own_critic is None
    if of_users and layout is not None and layout.images:
        raise ConfigError(
            "actor.own_critic=null: next to a custom network klrl's critic is an MLP, which "
            "cannot read images; add actor.own_critic.target=package.module:Name"
        )
    _check_a_step(env, copy, layout)
    if isinstance(actor, CNNActorConfig):
        check_images(layout, actor.arch)
    _check_distribution(env, actor, space)
    if "env.channels" in overridden and not (layout and layout.images):
        raise ConfigError(f"env.channels: has no effect: {env.named} has no image; drop it")
    if discrete and "actor.init_std" in overridden:
        raise ConfigError(
            f"actor.init_std: has no effect: {env.named} has discrete actions; drop it"
        )
    return copy


def _check_pictures(env: EnvConfig, copy: gymnasium.Env) -> None:
    """Refuse a time limit for MuJoCo's pictures: OpenGL draws only in its context's thread."""
    drawn = copy.render_mode is not None and hasattr(copy.unwrapped, "mujoco_renderer")
    if drawn and env.step_timeout is not None:
        raise ConfigError(
            f"env.step_timeout={env.step_timeout:g}: MuJoCo would draw black pictures, since each "
            "call has its own thread; drop it, or render_mode"
        )


def _check_distribution(env: EnvConfig, actor: ActorConfig, space: Space) -> None:
    """Require that the chosen distribution fits the action space."""
    setting, discrete = actor.distribution_setting, is_discrete(space)
    text = f"{setting}={actor.chosen}: the actions of {env.named}"
    if actor.chosen in ("normal", "tanh_normal") and discrete:
        raise ConfigError(
            f"{text} are discrete; choose {setting}=categorical or {setting}={actor.fitting}"
        )
    if actor.chosen == "categorical" and not discrete:
        raise ConfigError(
            f"{text} are continuous; choose {setting}=normal, tanh_normal or {actor.fitting}"
        )
    if actor.chosen == "tanh_normal" and not (
        np.isfinite([space.low, space.high]).all() and (space.low < space.high).all()
    ):
        raise ConfigError(
            f"{text} lack a finite lower bound below the upper one; choose {setting}=normal"
        )


class PolicyKind(NamedTuple):
    """The observations, actions and distribution of a policy, to compare two policies.

    ``bounds``: the action bounds of ``tanh_normal``; on a different task a policy keeps its own.
    """

    distribution: str
    observation: object
    action: object
    bounds: str

    def differences(self, other: PolicyKind) -> list[tuple[str, object, object]]:
        """List (name, own value, other value) for each field that differs."""
        names = ("action distribution", "observation", "action", "range of actions")
        triples = zip(names, self, other, strict=True)
        return [(name, here, there) for name, here, there in triples if here != there]


def policy_kind(env: EnvConfig, actor: ActorConfig) -> PolicyKind:
    """Return the kind of policy that ``actor`` would have in an environment."""
    copy = _make(env)
    chosen = actor.chosen if actor.chosen in ("tanh_normal", "categorical") else "normal"
    family, space = FAMILIES.get(type(copy.action_space), chosen), copy.action_space
    layout = layout_of(env.named, copy.observation_space, space, env.action_mask, env.channels)
    seen = spaces.flatdim(copy.observation_space) if layout is None else layout.names
    action, bounds = action_signature(space), ""
    if family == "tanh_normal" and isinstance(space, spaces.Box):
        pairs = zip(space.low.flat, space.high.flat, strict=True)
        bounds = " ".join(f"{low:g}..{high:g}" for low, high in pairs)
    copy.close()
    return PolicyKind(family, seen, action, bounds)


def _check_a_step(env: EnvConfig, copy: gymnasium.Env | Library, layout: Layout | None) -> None:
    """Reset, step once and close: many wrong arguments of an environment fail only then."""
    with _refusing(env):
        if not isinstance(copy, gymnasium.Env):
            copy.prepare(layout)
            copy.trial()
        else:
            _step_once(env, copy if layout is None else Packed(copy, layout), layout)


def _step_once(env: EnvConfig, copy: gymnasium.Env, layout: Layout | None) -> None:
    """Reset and step a copy, and check the results."""

    def step() -> tuple[tuple[np.ndarray, object], object]:
        reset = copy.reset(seed=0)
        copy.action_space.seed(0)
        # An environment may raise an error for an excluded action.
        action = any_action(layout, copy.action_space, reset[0], np.random.default_rng(0))
        after = copy.step(action)
        copy.close()
        return reset, after

    reset, after = within(env.step_timeout, step)
    if isinstance(env, CustomEnvConfig):
        _check_results(copy.observation_space, reset, after)
    space = copy.observation_space
    if layout is None and isinstance(space, spaces.Box):
        require_observation(reset[0], space.shape, dtype=space.dtype)
    masked = env.action_mask == "auto" and not (layout is not None and layout.masked)
    choices = isinstance(copy.action_space, spaces.Discrete | spaces.MultiDiscrete)
    if masked and choices and isinstance(reset[1], Mapping) and MASK in reset[1]:
        warn(
            f"actions: info has {MASK}, which env.action_mask=auto does not read; set "
            "env.action_mask=info, or none to ignore it"
        )


@contextmanager
def _refusing(env: EnvConfig) -> Iterator[None]:
    """Turn the failures of an environment's first step into a ConfigError."""
    try:
        yield
    except TookTooLong:
        raise ConfigError(
            f"env.step_timeout={env.step_timeout:g}: the first step of {env.named} takes longer; "
            "fix the environment, or raise the limit"
        ) from None
    except Misfit as error:
        raise ConfigError(
            f"{env.named}: its first step: {error}; fix the environment, or a setting named here"
        ) from error
    except (Exception, SystemExit) as error:  # an environment may raise anything
        if isinstance(env, CustomEnvConfig):
            with config_errors("env", env):
                raise
        fix = f"fix {env.arguments}{' or env.wrappers' * bool(env.wrappers)}"
        raise ConfigError(
            f"{env.named} with {env.arguments}={env.kwargs}: its first step fails: "
            f"{with_line(error)}; {fix}"
        ) from error


def _check_results(space: Space, reset: object, step: object) -> None:
    """Require that the results of a custom environment fit its spaces."""
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise Misfit(f"reset returned {type(reset).__name__}; give observation, info")
    if not (isinstance(step, tuple) and len(step) == 5):
        raise Misfit(
            f"step returned {type(step).__name__}; give observation, reward, terminated, "
            "truncated, info"
        )
    for observation in (reset[0], step[0]):
        if isinstance(space, spaces.Box):
            require_observation(observation, space.shape)
            if not np.isfinite(np.asarray(observation)).all():
                raise Misfit("an observation is not finite")
        elif not space.contains(observation):
            raise Misfit(f"observation {observation!r:.60} is not in its space {space}")
    if not math.isfinite(reward := require_number(step[1])):
        raise Misfit(f"the first reward is {reward}; give finite numbers")
    require_flag("terminated", step[2])
    require_flag("truncated", step[3])


def _check_id(env_id: str) -> None:
    """Refuse unknown ids; ``module:id`` imports the module first."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ConfigError(
            f"env.id={env_id}: {first_line(error).rstrip('.')}; for an environment that a "
            f"module registers, give env.id=module:{name}"
        ) from error
    except (ModuleNotFoundError, TypeError, ValueError) as error:  # a bad name, such as ``..name``
        extra = EXTRAS.get(module)
        remedy = "install it or fix its name" if extra is None else _install(extra)
        raise ConfigError(f"env.id={env_id}: {error}; {remedy}") from error


#: Module of an environment -> klrl's extra that installs it.
EXTRAS = {"ale_py": "atari", "minigrid": "minigrid"}


def _install(extra: str) -> str:
    return f"pip install 'klrl[{extra}]'"


def make_checked(env: EnvConfig, device: str = "cpu") -> gymnasium.Env | Library:
    """Make a copy of an environment; raise a ConfigError with the reason if that fails."""
    if not isinstance(env, CustomEnvConfig):
        _check_id(env.id)
    return _make(env, device)


def _make(env: EnvConfig, device: str = "cpu") -> gymnasium.Env | Library:
    try:
        return make_one(env, device=device)
    except ConfigError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        said = first_line(error)
        if "box2d" in said.lower():
            said = f"Box2D is not installed; {_install('box2d')}"
        raise ConfigError(f"env.id={env.id}: {said}") from error
    except (Exception, SystemExit) as error:  # an environment may raise anything
        given = f" with env.kwargs={env.kwargs}" if env.kwargs else ""
        raise ConfigError(
            f"env.id={env.id}{given}: gymnasium.make refuses it: {first_line(error)}; "
            "fix env.id or env.kwargs"
        ) from error


def _check_same_kind(setting: str, path: str, config: Config, run: Path) -> None:
    """Refuse a run whose settings describe a different kind of policy."""
    other = control_config(run, setting)
    kind, other_kind = (policy_kind(c.env, c.actor) for c in (config, other))
    for name, own, others in kind.differences(other_kind):
        serves = name == "action distribution" and others in choices_for("actor", CONTROL)
        choice = f"choose actor={others}" if serves else "give another run"
        raise ConfigError(
            f"{setting}={path}: its {name} is {others}, but this run's is {own}; {choice}"
        )
    network, other_network = (_network(c.actor) for c in (config, other))
    if setting == "actor.init" and network != other_network:
        raise ConfigError(f"{setting}={path}: its network is {other_network}; choose that here")
    on = other.env.normalize_observation
    if setting == "actor.init" and on != config.env.normalize_observation:
        told = f"env.normalize_observation={str(on).lower()}"
        raise ConfigError(f"{setting}={path}: the run has {told}; set that here")


def _network(actor: ActorConfig) -> str:
    keys = (*actor.shapes, "target", "args", "own_critic")
    return " ".join(f"{key}={each}" for key, each in asdict(actor).items() if key in keys)


def control_config(run: Path, setting: str = "run") -> Config:
    """Read the settings of a control run; refuse a language run."""
    from klrl.runs.resume import stored_config

    config = stored_config(run)
    if not isinstance(config, Config):
        raise ConfigError(f"{setting}={run}: this is a language run; give a control run")
    return config
