"""The preflight check of ``collector=ray``: what it needs of this machine."""

from __future__ import annotations

import os
import socket

from klrl.base.errors import ConfigError


def check_ray_machine() -> None:
    """Refuse to start when the cluster at ``RAY_ADDRESS`` does not answer.

    Raises:
        ConfigError: the address is malformed or nothing answers there.
    """
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
