"""What all contenders share: their arguments, their clock, the line of JSON that they print.

Nothing here imports torch or klrl, so that a contender pays for its own imports only.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

ENV_IDS = {
    "pendulum": "Pendulum-v1",
    "pendulum_batch": "Pendulum-v1",
    "half_cheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "cartpole": "CartPole-v1",
}

#: Packages whose versions decide a figure; those that are not installed are left out.
PACKAGES = (
    "klrl",
    "torch",
    "torchrl",
    "tensordict",
    "stable-baselines3",
    "gymnasium",
    "mujoco",
    "numpy",
)


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """The settings that are equal for all contenders; the defaults are Stable-Baselines3's."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--env", choices=ENV_IDS, default="pendulum")
    parser.add_argument("--n", type=int, default=8, help="copies of the environment")
    parser.add_argument("--t", type=int, default=256, help="steps of each copy per rollout")
    parser.add_argument("--iterations", type=int, default=6, help="the first one is not counted")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatches", type=int, default=32, help="per epoch")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--lmbda", type=float, default=0.95)
    parser.add_argument("--width", type=int, default=64, help="of both hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    return parser


# ---------------------------------------------------------------------------------------- clock


def cpu_seconds() -> float:
    """CPU time of this process, all its threads, and its children that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class Clock:
    """CPU time by iteration and phase.

    ``start`` when everything is built, ``lap`` at the end of each iteration. Phases are read with
    process_time (0.6 us), which sees no children; the sum over an iteration does.
    """

    def __init__(self) -> None:
        self.import_seconds = time.process_time()
        self.laps: list[dict[str, float]] = []
        self.phases: dict[str, float] = defaultdict(float)
        self.now = time.process_time

    def start(self) -> None:
        """The first iteration begins."""
        self._cpu = cpu_seconds()
        self.phases.clear()

    def lap(self) -> None:
        """An iteration ended."""
        cpu = cpu_seconds()
        self.laps.append({"cpu": cpu - self._cpu, **self.phases})
        self.phases.clear()
        self._cpu = cpu

    def resume(self) -> None:
        """Leave out what happened since the last ``lap``."""
        self._cpu = cpu_seconds()
        self.phases.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the CPU time of a block."""
        before = self.now()
        try:
            yield
        finally:
            self.phases[name] += self.now() - before

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its CPU time booked; cheaper than ``phase`` in a loop."""
        phases, now = self.phases, self.now

        def call(*args: Any, **kwargs: Any) -> Any:
            before = now()
            result = function(*args, **kwargs)
            phases[name] += now() - before
            return result

        return call


def report(
    name: str,
    args: argparse.Namespace,
    clock: Clock,
    *,
    packages: Sequence[str] = PACKAGES,
    **more: Any,
) -> None:
    """Print the line."""
    counted = clock.laps[1:]
    if not counted:
        raise SystemExit(f"{name}: one iteration is not enough, the first is not counted")
    frames = args.n * args.t * len(counted)
    cpu = sum(lap["cpu"] for lap in counted)
    line = {
        "name": name,
        "env": args.env,
        "n": args.n,
        "t": args.t,
        "frames": frames,
        "frames_per_cpu_second": round(frames / cpu, 3),
        "phases": _phases(counted, frames, cpu),
        "import_cpu_seconds": round(clock.import_seconds, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "versions": versions(packages),
        **more,
    }
    print(json.dumps(line), file=sys.__stdout__, flush=True)


def _phases(laps: list[dict[str, float]], frames: int, cpu: float) -> dict[str, float]:
    """us of CPU per frame: disjoint phases and the rest.

    Contenders book ``rollout`` as a whole and ``env`` inside of it; ``policy`` is what remains.
    """
    sums: dict[str, float] = defaultdict(float)
    for lap in laps:
        for key in lap.keys() - {"cpu"}:
            sums[key] += lap[key]
    rollout = sums.pop("rollout", 0.0)
    found = {"env": sums.pop("env", 0.0)}
    found["policy"] = rollout - found["env"]
    found.update(sorted(sums.items()))
    found["other"] = cpu - sum(found.values())
    return {key: round(value / frames * 1e6, 2) for key, value in found.items()}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of what is installed here, without their build tags."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
