"""What ``collector=ray`` asks of the other settings and of this machine. No torch in here."""

from __future__ import annotations

import os
import socket

from klrl.config import Config, LegacyKLConfig, RayCollectorConfig
from klrl.errors import ConfigError
from klrl.preflight.install import require


def check_ray(c: Config, collector: RayCollectorConfig) -> None:
    """Refuse settings that the workers cannot share or serve.

    Raises:
        ConfigError: with the setting, its value and the remedy.
    """
    if c.env.num_envs % collector.workers:
        raise ConfigError(
            f"collector.workers={collector.workers}: does not divide env.num_envs="
            f"{c.env.num_envs}, and every worker plays as many copies; choose a divisor"
        )
    if isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(
            "kl.apply=step: with collector=ray the reference stays with the learner; use "
            "kl.apply=rollout, whose numbers are the same"
        )


def check_ray_machine() -> None:
    """Refuse to start without Ray, or where the cluster that ``RAY_ADDRESS`` names does not answer.

    Raises:
        ConfigError: with the package or the address.
    """
    require("ray", "collector=ray", "pip install 'klrl[ray]', or choose collector=vector")
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        raise ConfigError(
            f"RAY_ADDRESS={address}: give HOST:PORT as ray start --head prints it, or unset it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); "
            "run ray start --head on that machine, or unset it"
        ) from error
