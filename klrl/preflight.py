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

from klrl.config import ActorConfig, CheckpointReferenceConfig, Config, EnvConfig
from klrl.errors import ConfigError


def check_machine(
    config: Config, overridden: frozenset[str] = frozenset(), *, resumed: bool = False
) -> None:
    """Refuse a job that this machine cannot run.

    A resumed run holds its reference in its own checkpoint and needs no other folder.

    Raises:
        ConfigError: an optional package, a device, a run folder or an environment is missing.
    """
    if config.logger.name == "wandb":
        require("wandb", "logger=wandb", "pip install wandb, or choose logger=none")
    if isinstance(config.reference, CheckpointReferenceConfig) and not resumed:
        find_run(config.reference.path, "reference.path")
    if config.actor.init is not None and not resumed:
        find_run(config.actor.init, "actor.init")
    check_env(config.env, config.actor, overridden)
    check_device(config.device)


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
    if not (run / "manifest.json").is_file():
        raise ConfigError(f"{setting}={path}: holds no manifest.json; give a run folder")
    if not any(run.glob("checkpoints/*/*/manifest.json")):
        raise ConfigError(f"{setting}={path}: the run wrote no checkpoint; give another run")
    return run


def check_not_running(run: Path) -> None:
    """Refuse to resume a run that another process of this machine is still writing."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    pid = manifest.get("pid")
    if manifest.get("status") != "running" or pid is None or pid == os.getpid():
        return
    if Path(f"/proc/{pid}").exists():
        raise ConfigError(f"resume={run}: process {pid} is still running it; wait or stop it")


def check_env(env: EnvConfig, actor: ActorConfig, overridden: frozenset[str]) -> None:
    """Make the environment once, and refuse ids, arguments and spaces that cannot be served."""
    import gymnasium

    _check_id(env.id)
    made = _make(env)
    space = made.action_space
    made.close()
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    box = isinstance(space, gymnasium.spaces.Box)
    if not discrete and not box:
        raise ConfigError(
            f"env.id={env.id}: its action space is {type(space).__name__}; "
            "Box and Discrete are served"
        )
    if actor.distribution in ("normal", "tanh_normal") and not box:
        raise ConfigError(
            f"actor={actor.distribution}: the actions of env.id={env.id} are discrete; "
            "choose actor=categorical or actor=mlp"
        )
    if actor.distribution == "categorical" and not discrete:
        raise ConfigError(
            f"actor=categorical: the actions of env.id={env.id} are continuous; "
            "choose actor=normal, tanh_normal or mlp"
        )
    if box:
        _check_bounds(env.id, actor, space)
    if discrete and "actor.init_std" in overridden:
        raise ConfigError(
            f"actor.init_std: nothing reads it here: env.id={env.id} has discrete actions; drop it"
        )


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
    except (TypeError, ValueError, AssertionError, gymnasium.error.Error) as error:
        given = f" with env.kwargs={env.kwargs}" if env.kwargs else ""
        raise ConfigError(
            f"env.id={env.id}{given}: gymnasium.make refuses it: {_first_line(error)}; "
            "mend env.id or env.kwargs"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
