"""Checks that this machine can run a job: optional packages, a compiler, CUDA devices."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from klrl.base import ranks
from klrl.base.errors import ConfigError, user_code
from klrl.config import (
    GROUPS,
    CustomLoggerConfig,
    JobConfig,
    LanguageConfig,
    LegacyKLConfig,
    WandbConfig,
    choice_of,
)
from klrl.config.given import Given
from klrl.domains import domain_of

if TYPE_CHECKING:
    import torch


def check_language_packages(config: LanguageConfig) -> None:
    """Refuse a language job if a package of klrl's extra ``language`` is not installed."""
    packages = ["transformers", "tokenizers"]
    for package in [*packages, "peft"] if config.actor.lora.r else packages:
        setting = "actor.lora.r" if package == "peft" else f"env={config.env.name}"
        require(package, setting, "pip install 'klrl[language]'")


def require(package: str, setting: str, remedy: str) -> None:
    """Refuse a setting whose optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting}: the package {package} is not installed; {remedy}")


def cxx() -> str | None:
    """Return the path of the C++ compiler that torch would call; None without a compiler."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 (AVX-512, AMX or ARM)."""
    import torch

    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


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


@user_code()
def check_machine(config: JobConfig, given: Sequence[Given] = (), *, resumed: bool = False) -> None:
    """Refuse a job that this machine cannot run.

    For a resumed run, the runs in ``reference.path`` and ``actor.init`` are not checked, since its
    checkpoint contains their weights. ``given``: the overrides of the user.
    """
    for group in GROUPS:
        check_package(group, getattr(config, group).name)
    for name in config.logger.also:
        check_package("logger", name)
    if config.logger.name == "wandb":
        from klrl.runs.wandb_logger import check_wandb

        check_wandb(cast("WandbConfig", config.logger))
    if isinstance(config.logger, CustomLoggerConfig):
        from klrl.runs.loggers import check_logger

        check_logger(config.logger)
    overridden = frozenset(each.key for each in given)
    if ranks.world() > 1:
        check_ranks(config)
    check_device(config.device)  # an environment may compute on it
    domain_of(config).function("job_checks")(config, overridden, resumed=resumed)


def check_ranks(config: JobConfig) -> None:
    """Refuse a job that several processes of torchrun cannot share."""
    world, local = ranks.world(), ranks.local_rank() or 0
    if not isinstance(config, LanguageConfig):
        raise ConfigError(
            f"env={config.env.name}: a control run is one process; start it without torchrun, or "
            "start a sweep with -m"
        )
    check_shareable(config)
    prompts = config.collector.prompts // config.learner.minibatches
    if prompts % world:
        raise ConfigError(
            f"torchrun: {world} processes do not divide the {prompts} prompts of a minibatch "
            "(collector.prompts / learner.minibatches); change one of the three"
        )
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device={config.device}: each process takes its own GPU; use cuda")
    if config.device != "cpu" and (count := cuda_devices()) and local >= count:
        raise ConfigError(
            f"device={config.device}: no GPU is left, this machine has {count}; give torchrun "
            f"--nproc_per_node {count}, or device=cpu"
        )


def check_shareable(config: LanguageConfig) -> None:
    """Refuse parts that only one process has."""
    if isinstance(config.kl, LegacyKLConfig) and config.kl.apply == "step":
        raise ConfigError("kl.apply=step: TorchRL's environment is one process; use rollout")
    if config.advantage.name == "gae":
        raise ConfigError("advantage=gae: its critic learns in one process; choose group")


def device_of(name: str) -> torch.device:
    """Return a device: ``auto`` is cuda if available, else cpu; ``cuda`` is torch's current GPU.

    Each process of torchrun has its own GPU.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and (local := ranks.local_rank()) is not None:
        torch.cuda.set_device(local)
    return torch.device(f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name)
