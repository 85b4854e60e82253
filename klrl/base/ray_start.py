"""Starts Ray on loopback, or joins a Ray cluster by its address. Needs ``klrl[ray]``."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def start_ray(address: str | None = None, **options: object) -> ModuleType:
    """Import Ray; join the cluster at ``address`` or ``RAY_ADDRESS``, or start a local Ray.

    klrl starts a local Ray without a dashboard, on loopback; if Ray listens elsewhere, klrl warns.
    ``options`` are arguments of ``ray.init``.

    Raises:
        ImportError: Ray is not installed.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError("service_backend='ray' needs Ray: pip install 'klrl[ray]'") from error
    if ray.is_initialized():
        return ray
    if address is not None:
        if address.startswith("127."):
            _keep_to_loopback()
        with _own_sigterm():
            ray.init(address=address, **options)
        return ray
    _keep_to_loopback()
    with _own_sigterm():
        # Without "local", Ray would join a cluster on this machine, and refuse the other arguments.
        local = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(**local, **options)
    if not ray.util.get_node_ip_address().startswith("127."):
        warnings.warn(
            "this version of Ray listens on every address of this machine; start Ray yourself with "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment",
            stacklevel=2,
        )
    return ray


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the program's SIGTERM handler, since Ray installs one that exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if signal.getsignal(signal.SIGTERM) is not handler:
        signal.signal(signal.SIGTERM, handler)


def _keep_to_loopback() -> None:
    """Stop Ray 2.60 from replacing a loopback address with the machine's external address."""
    from ray._private import ray_constants

    # Ray's child processes read the variable. This process has already read it into the constant.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
