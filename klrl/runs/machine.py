"""Checks that this machine can run a job: optional packages, wandb's key, CUDA devices."""

from __future__ import annotations

import configparser
import importlib.util
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, cast

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import expanded
from klrl.base.text import escaped
from klrl.config import (
    GROUPS,
    CustomLoggerConfig,
    JobConfig,
    LanguageConfig,
    WandbConfig,
    choice_of,
)
from klrl.domains import domain_of

if TYPE_CHECKING:
    import torch


def check_language_packages(config: LanguageConfig) -> None:
    """Refuse a language job if a package of klrl's extra ``language`` is not installed."""
    packages = ["transformers", "tokenizers", "safetensors", "filelock"]
    for package in [*packages, "peft"] if config.actor.lora.r else packages:
        setting = "actor.lora.r" if package == "peft" else "actor=causal_lm"
        require(package, setting, "pip install 'klrl[language]'")


def check_wandb(logger: WandbConfig) -> None:
    """Refuse settings that ``wandb.init`` would refuse, before the run starts."""
    mode = os.environ.get("WANDB_MODE")
    if logger.mode == "auto" and mode not in (None, "", "online", "offline", "disabled"):
        raise ConfigError(f"WANDB_MODE={mode}: choose online, offline or disabled, or unset it")
    server = wandb_server()
    if wandb_mode(logger.mode) == "online" and not has_wandb_key(server):
        raise ConfigError(
            "logger.mode=online: there is no wandb key; run wandb login, set WANDB_API_KEY, "
            "or choose logger.mode=offline"
        )
    wrong = sorted(set(logger.project) & set("/\\#?%:"))
    if wrong or not logger.project or len(logger.project) > 128:
        raise ConfigError(
            f"logger.project={logger.project}: give 1 to 128 characters without / \\ # ? % :"
        )


def wandb_mode(mode: str) -> Any:
    """Resolve wandb's mode: ``auto`` is WANDB_MODE if set, else online with a key, else offline."""
    if mode != "auto":
        return mode
    given = os.environ.get("WANDB_MODE")
    return given or ("online" if has_wandb_key(wandb_server()) else "offline")


def wandb_server() -> str:
    """Return the URL of the user's wandb server; refuse a current folder that would change it."""
    # When wandb starts, it calls git in the current folder's repository, which may be a stranger's.
    os.environ["WANDB_DISABLE_GIT"] = "true"
    from wandb import Settings
    from wandb.sdk.lib.settings_file import SettingsFiles

    default, allowed = Settings(), {"project", "entity", "mode", "anonymous", "disabled"}
    home = expanded(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb") / "settings"
    user = SettingsFiles(global_settings=None, local_settings=home).all()
    server = os.environ.get("WANDB_BASE_URL") or user.get("base_url") or default.base_url
    file = escaped(default.settings_workspace)
    try:
        folder = default.read_system_settings().all()  # of the current folder alone
    except (OSError, ValueError, configparser.Error) as error:
        raise ConfigError(f"{file}: cannot be read ({first_line(error)}); remove it") from error
    for key, value in folder.items():
        if key not in allowed and (key, value.rstrip("/")) != ("base_url", server.rstrip("/")):
            raise ConfigError(
                f"{file}: sets {escaped(f'{key}={value}')}, which may send your wandb key "
                "elsewhere; remove it or, if this server is yours, set WANDB_BASE_URL to it"
            )
    return server


def has_wandb_key(server: str) -> bool:
    """Return whether wandb finds a key for its server; refuse a malformed key."""
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib.wbauth import authenticate_session

    try:
        found = authenticate_session(host=server, source="klrl", prompt=False, update_session=False)
    except AuthenticationError as error:
        raise ConfigError(
            f"wandb's key for {server}: {first_line(error).rstrip('.')}; fix it, or set "
            "logger.mode=offline"
        ) from error
    return found is not None


def require(package: str, setting: str, remedy: str) -> None:
    """Refuse a setting whose optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting}: the package {package} is not installed; {remedy}")


def cxx() -> str | None:
    """Return the path of the C++ compiler that torch would call; None without a compiler."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def check_package(group: str, name: str) -> None:
    """Refuse a choice whose optional package is not installed."""
    choice = choice_of(group, name)
    if choice.package:
        require(choice.package, f"{group}={name}", choice.remedy)


def check_device(device: str) -> None:
    """Refuse a CUDA device that this machine does not have."""
    if not device.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            f"device={device}: this machine has no CUDA device; choose device=auto or device=cpu"
        )
    if int(device.partition(":")[2] or 0) >= count:
        raise ConfigError(
            f"device={device}: torch sees {count} CUDA device{'s' * (count > 1)} here, the last is "
            f"cuda:{count - 1}; choose another, or see CUDA_VISIBLE_DEVICES"
        )


def cuda_devices() -> int:
    """Count this machine's CUDA devices; import torch only if there is a driver."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, WSL's, AMD's
    if "torch" not in sys.modules and not any(map(os.path.exists, drivers)):
        return 0
    import torch

    return torch.cuda.device_count()


def check_machine(
    config: JobConfig, overridden: frozenset[str] = frozenset(), *, resumed: bool = False
) -> None:
    """Refuse a job that this machine cannot run.

    For a resumed run, the runs in ``reference.path`` and ``actor.init`` are not checked, since its
    checkpoint contains their weights. ``overridden``: the keys that the user set.
    """
    for group in GROUPS:
        check_package(group, getattr(config, group).name)
    for name in config.logger.also:
        check_package("logger", name)
    if config.logger.name == "wandb":
        check_wandb(cast("WandbConfig", config.logger))
    if isinstance(config.logger, CustomLoggerConfig):
        from klrl.runs.own_logger import check_logger

        check_logger(config.logger)
    domain_of(config).function("preflight")(config, overridden, resumed=resumed)
    check_device(config.device)


def device_of(name: str) -> torch.device:
    """Return a device: ``auto`` is cuda if available, else cpu; ``cuda`` is torch's current GPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name)
