"""Starts Ray on loopback or joins a cluster by its address; counts the processes that fit there.

Needs the extra ``klrl[ray]``.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

from klrl.base.errors import ConfigError, WorkerError, last_line


def start_ray(address: str | None = None, **options: object) -> ModuleType:
    """Import Ray; join the cluster at ``address`` or ``RAY_ADDRESS``, or start a local Ray.

    A local Ray listens on loopback only, without a dashboard. ``options`` go to ``ray.init``.

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
        # Without "local", Ray would join one that already runs here and refuse the other arguments.
        local = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(**local, **options)
    if not ray.util.get_node_ip_address().startswith("127."):
        warnings.warn(
            "this version of Ray listens on every address of this machine; start it yourself with "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment",
            stacklevel=2,
        )
    return ray


def check_address(address: str | None, setting: str) -> None:
    """Refuse the address of a cluster that does not answer; None, "" and ``auto`` pass."""
    if address in (None, "", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        raise ConfigError(
            f"{setting}={address}: give HOST:PORT as ray start --head prints it, or unset it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{setting}={address}: no Ray cluster answers there ({error}); "
            "run ray start --head on that machine, or unset it"
        ) from error


@contextmanager
def quiet_ray(setting: str, address: str | None = None, **options: object) -> Iterator[ModuleType]:
    """Start or join Ray as :func:`start_ray` does, silence its output, and shut it down at the end.

    Ray prints a paragraph about each process or machine that dies, and has no setting against that;
    klrl reports what was lost.

    Raises:
        WorkerError: Ray does not start, or the cluster cannot be joined; ``setting`` comes first.
    """
    # klrl raises the first error of several processes; Ray would print all the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    import ray
    import ray._private.worker as worker

    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        try:
            start_ray(address, log_to_driver=False, logging_level="CRITICAL", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"{setting}: Ray does not start: {last_line(error)}") from error
        try:
            yield ray
        finally:
            ray.shutdown()
    finally:
        worker.print_to_stdstream = before


#: Ray's handle of a result (``ObjectRef``).
Handle = TypeVar("Handle")


def wait(ray: ModuleType, handles: Sequence[Handle], timeout: float) -> list[Handle]:
    """Wait for all results, at most ``timeout`` seconds; return the handles that are ready.

    Ray wraps an exception that a signal handler raises meanwhile; the original is raised here.
    """
    try:
        ready: list[Handle] = ray.wait(handles, num_returns=len(handles), timeout=timeout)[0]
    except SystemError as error:
        raise error.__cause__ or error from None
    return ready


#: Seconds that klrl waits for the head of a cluster; after 60 s Ray would end klrl's process.
HEADLESS = 30


def headless(ray: ModuleType) -> str | None:
    """The error message if the head of the cluster does not answer, else None.

    Any other call to Ray would block until the head answers.
    """
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return f"the head of the Ray cluster ({host}:{port}) does not answer"
    return None


def machines(ray: ModuleType) -> int:
    """The number of machines in the cluster that Ray counts as alive.

    Ray needs ten seconds or more to notice that a machine is gone.
    """
    return sum(node["Alive"] for node in ray.nodes())


def room(ray: ModuleType, cpus: float, gpus: float = 0) -> int:
    """How many processes of ``cpus`` and ``gpus`` each fit on the living machines, busy or not."""
    return sum(
        min(
            int(node["Resources"].get(kind, 0) / each + 1e-9)
            for kind, each in (("CPU", cpus), ("GPU", gpus))
            if each
        )
        for node in ray.nodes()
        if node["Alive"]
    )


class Shortage:
    """Reports a lack of CPUs to ``say``, and tells when it has lasted ``limit`` seconds."""

    def __init__(self, limit: float, say: Callable[[str], object]) -> None:
        self._limit, self._say = limit, say
        self._since: float | None = None

    def lasts(self, missing: str | None) -> bool:
        """Note what is missing now (None: nothing); return whether the lack has lasted too long."""
        if missing is None:
            self._since = None
            return False
        if self._since is None:
            self._since = time.monotonic()
            self._say(f"{missing}: waiting {self._limit:g} s for it to change")
        return time.monotonic() - self._since >= self._limit


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the program's SIGTERM handler: Ray installs one that exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if signal.getsignal(signal.SIGTERM) is not handler:
        signal.signal(signal.SIGTERM, handler)


def _keep_to_loopback() -> None:
    """Stop Ray 2.60 from replacing a loopback address with the machine's external address."""
    from ray._private import ray_constants

    # The variable is for Ray's processes; the constant is for this one, which has imported ray.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
