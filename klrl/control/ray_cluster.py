"""Ray for ``collector=ray``: started on this machine, a cluster's, or one that runs already."""

from __future__ import annotations

import os
from typing import Any

import ray
import ray._private.worker

from klrl.base.errors import WorkerError
from klrl.base.ray_start import start_ray


class Cluster:
    """Ray, started on loopback or joined at ``RAY_ADDRESS``, unless it runs already.

    Args:
        cpus: that the workers request. A Ray started here declares that many, whatever the machine
            has: workers would wait forever for CPUs that Ray does not have.

    Raises:
        WorkerError: Ray does not start, or the cluster has fewer CPUs.
    """

    def __init__(self, cpus: int) -> None:
        self.ray = ray
        # The learner raises the first worker's error; Ray would print those of the others.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        self._entered = not ray.is_initialized()
        self._print = ray._private.worker.print_to_stdstream
        if self._entered:
            self._enter(cpus)
        available = ray.cluster_resources().get("CPU", 0)
        if available < cpus:
            self.leave()
            raise WorkerError(
                f"collector=ray: the workers ask for {cpus} CPUs, the Ray cluster has "
                f"{available:g}; lower collector.workers or collector.cpus_per_worker, or add "
                "machines"
            )

    def leave(self) -> None:
        """Stop or leave Ray if it was started or joined here."""
        if self._entered:
            ray.shutdown()
            ray._private.worker.print_to_stdstream = self._print

    def _enter(self, cpus: int) -> None:
        # Ray prints a paragraph about each process that dies, and has no setting against that.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
        if "RAY_ADDRESS" not in os.environ:
            options["num_cpus"] = cpus
        try:
            start_ray(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"collector=ray: Ray does not start: {last_line(error)}") from error


def last_line(error: BaseException | None) -> str:
    """The last line of an error's message; Ray's messages begin with a traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
