"""Checks that need the machine: packages, devices, environments, run folders.

Run before anything is written. torch is imported only where a CUDA device is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from klrl.config import (
    ActorConfig,
    CheckpointReferenceConfig,
    Config,
    EnvConfig,
    JobConfig,
    LanguageConfig,
    RayCollectorConfig,
    WandbConfig,
)
from klrl.errors import ConfigError
from klrl.ray_checks import check_ray_machine
from klrl.run_folder import process_start


def check_machine(
    config: JobConfig, overridden: frozenset[str] = frozenset(), *, resumed: bool = False
) -> None:
    """Refuse a job that this machine cannot run.

    A resumed run holds its reference and its weights in its own checkpoint and needs no other
    folder.

    Args:
        config: the checked job.
        overridden: the keys that the user gave.
        resumed: whether the run goes on from its own checkpoint.

    Raises:
        ConfigError: an optional package, a device, a run folder or an environment is missing, or
            another run's policy does not fit.
    """
    if isinstance(config.logger, WandbConfig):
        check_wandb(config.logger)
    if isinstance(config, LanguageConfig):
        check_language_packages(config)
        from klrl.language.machine import check_language_machine

        check_language_machine(config, resumed=resumed)
    else:
        assert isinstance(config, Config)
        if isinstance(config.collector, RayCollectorConfig):
            check_ray_machine()
        check_env(config.env, config.actor, overridden)
        if not resumed:
            check_other_runs(config)
    check_device(config.device)


def check_language_packages(config: LanguageConfig) -> None:
    """Refuse a language job on an install without the extra."""
    packages = ["transformers", "tokenizers", "safetensors", "filelock"]
    for package in [*packages, "peft"] if config.actor.lora.r else packages:
        setting = "actor.lora.r" if package == "peft" else "actor=causal_lm"
        require(package, setting, "pip install 'klrl[language]'")


def check_wandb(logger: WandbConfig) -> None:
    """Refuse what ``wandb.init`` would refuse, before there is a run to mark failed."""
    require("wandb", "logger=wandb", "pip install wandb, or choose logger=none")
    mode = os.environ.get("WANDB_MODE")
    if logger.mode == "auto" and mode not in (None, "", "online", "offline", "disabled"):
        raise ConfigError(f"WANDB_MODE={mode}: choose online, offline or disabled, or unset it")
    if wandb_mode(logger.mode) == "online" and not has_wandb_key():
        raise ConfigError(
            "logger.mode=online: no wandb key is found; run wandb login, set WANDB_API_KEY, "
            "or choose logger.mode=offline"
        )
    wrong = sorted(set(logger.project) & set("/\\#?%:"))
    if wrong or not logger.project or len(logger.project) > 128:
        raise ConfigError(
            f"logger.project={logger.project}: give 1 to 128 characters without / \\ # ? % :"
        )


def wandb_mode(mode: str) -> Any:
    """``auto``: WANDB_MODE where it is set, else online with a key, else offline."""
    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")


def has_wandb_key() -> bool:
    """Whether the environment or the netrc file holds a key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "api.wandb.ai" in netrc.read_text(encoding="utf-8")


def other_runs(config: Config | LanguageConfig) -> list[tuple[str, str, Path]]:
    """The runs whose policies this one takes, as (setting, its value, folder).

    Raises:
        ConfigError: a run or its checkpoint is missing.
    """
    others, found = [], []
    if isinstance(config.reference, CheckpointReferenceConfig) and config.kl.mode != "none":
        others.append(("reference.path", config.reference.path, config.reference.which))
    if config.actor.init is not None:
        others.append(("actor.init", config.actor.init, "last"))
    for setting, path, which in others:
        run = find_run(path, setting)
        if not any(run.glob(f"checkpoints/{which}/*/manifest.json")):
            raise ConfigError(f"{setting}={path}: has no checkpoint '{which}'; choose last or best")
        found.append((setting, path, run))
    return found


def check_other_runs(config: Config) -> None:
    """Refuse a reference or a start whose policy is missing or of another kind, by its settings."""
    for setting, path, run in other_runs(config):
        _check_same_kind(setting, path, config, run)


def _check_same_kind(setting: str, path: str, config: Config, run: Path) -> None:
    """The other policy sees as many numbers and acts in the same way."""
    from klrl.resume import stored_config

    other = stored_config(run)
    if not isinstance(other, Config):
        raise ConfigError(f"{setting}={path}: is a language run; give a control run")
    mine, theirs = (_kind(c.env, c.actor) for c in (config, other))
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


def _kind(env: EnvConfig, actor: ActorConfig) -> tuple[str, int, Any]:
    """(distribution, length of an observation, length of an action or number of actions)."""
    import gymnasium

    made = _make(env)
    discrete = isinstance(made.action_space, gymnasium.spaces.Discrete)
    auto = "categorical" if discrete else "normal"
    family = auto if actor.distribution == "auto" else actor.distribution
    size = gymnasium.spaces.flatdim(made.observation_space)
    action = made.action_space.n if discrete else made.action_space.shape
    made.close()
    return family, size, action


def require(package: str, setting: str, remedy: str) -> None:
    """Refuse a setting whose optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting}: the package {package} is not installed; {remedy}")


def check_device(device: str) -> None:
    """Refuse a CUDA device that is not here."""
    if not device.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count()
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        here = f"this machine has {count} CUDA device{'s' * (count != 1)}"
        raise ConfigError(f"device={device}: {here}; choose device=auto or device=cpu")


def find_run(path: str, setting: str) -> Path:
    """The run folder behind a setting; it must hold a manifest and a checkpoint.

    Raises:
        ConfigError: no such folder, no run in it, or a run that never wrote a checkpoint.
    """
    run = Path(path).expanduser()
    if not run.is_dir():
        raise ConfigError(f"{setting}={path}: no such folder; give a run folder below outputs/")
    try:
        json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{setting}={path}: no manifest.json in it; give a run folder") from error
    except ValueError as error:
        raise ConfigError(
            f"{setting}={path}: its manifest.json is broken ({error}); give another run"
        ) from error
    if not (run / ".hydra" / "config.yaml").is_file():
        raise ConfigError(f"{setting}={path}: no .hydra/config.yaml in it; give another run")
    if not any(run.glob("checkpoints/*/*/manifest.json")):
        raise ConfigError(f"{setting}={path}: the run wrote no checkpoint; give another run")
    return run


def check_not_running(run: Path) -> None:
    """Refuse to resume a run that another process of this machine is still writing."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    pid = manifest.get("pid")
    if manifest.get("status") != "running" or pid is None or pid == os.getpid():
        return
    started = process_start(pid)
    if started is not None and started == manifest.get("pid_started"):
        raise ConfigError(f"resume={run}: process {pid} is still running it; wait or stop it")


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
    if actor.distribution in ("normal", "tanh_normal") and discrete:
        raise ConfigError(
            f"actor={actor.distribution}: the actions of env.id={env.id} are discrete; "
            "choose actor=categorical or actor=mlp"
        )
    if actor.distribution == "categorical" and not discrete:
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
    except (TypeError, ValueError, ArithmeticError, LookupError, AssertionError) as error:
        raise ConfigError(
            f"env.id={env.id} with env.kwargs={env.kwargs}: its first step fails: "
            f"{_first_line(error)}; mend env.kwargs"
        ) from error


def _check_bounds(env_id: str, actor: ActorConfig, space: Any) -> None:
    import numpy as np

    if actor.distribution == "tanh_normal" and not np.isfinite([space.low, space.high]).all():
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
        close = difflib.get_close_matches(name, list(gymnasium.registry), n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else "see gymnasium.registry for the known ids"
        reason = _first_line(error).split(" Did you mean")[0].rstrip(".")
        raise ConfigError(f"env.id={env_id}: {reason}; {hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.id={env_id}: {error}; install it or mend its name") from error


def _make(env: EnvConfig) -> Any:
    import gymnasium

    from klrl.gym_make import make_gym

    try:
        return make_gym(env.id, env.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"env.id={env.id}: {_first_line(error)}") from error
    except (TypeError, ValueError, AssertionError, ImportError, gymnasium.error.Error) as error:
        given = f" with env.kwargs={env.kwargs}" if env.kwargs else ""
        raise ConfigError(
            f"env.id={env.id}{given}: gymnasium.make refuses it: {_first_line(error)}; "
            "mend env.id or env.kwargs"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
