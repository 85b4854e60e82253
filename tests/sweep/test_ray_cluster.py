"""``launcher=ray`` and ``collector=ray`` on a cluster of several machines that dies piece by piece.

The machines are ``ray.cluster_utils.Cluster``'s: raylets of one machine, on loopback. klrl is a
user's command beside them. ``make test-ray`` runs this file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from klrl.runs.folder import RunFolder
from tests.conftest import QUICK
from tests.control.test_ray_run import LOOPBACK, listening
from tests.runs.commands import rows_of, timeless

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(400)]

EAGER = (*QUICK, "learner.compile=false")
#: What Ray says of itself; a page of it begins with one of these words.
RAYS_WORDS = re.compile(r"raylet|ray\.|ray::|\(pid=|node_id|Node ID|Traceback|WARNING|core_worker")


class Machines:
    """A cluster with a head that has no CPUs for others."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.address: str = cluster.address

    def add(self, cpus: int = 1) -> Any:
        return self.cluster.add_node(num_cpus=cpus, **ON_LOOPBACK)

    def kill(self, node: Any) -> None:
        """As a power cut: the raylet and all that it started."""
        processes = self.processes(node)
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, 20)
        self.cluster.worker_nodes.discard(node)

    def processes(self, node: Any) -> list[psutil.Process]:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def of(self, pid: int) -> Any:
        """The machine on which a process runs."""
        (found,) = (
            node
            for node in self.cluster.worker_nodes
            if pid in {process.pid for process in self.processes(node)}
        )
        return found


ON_LOOPBACK = {"node_ip_address": "127.0.0.1", "include_dashboard": False}


@pytest.fixture
def machines(monkeypatch) -> Iterator[Machines]:
    from klrl.base.ray_start import _keep_to_loopback

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    _keep_to_loopback()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **ON_LOOPBACK})
    try:
        yield Machines(cluster)
    finally:
        cluster.shutdown()


class Command:
    """klrl as a user starts it, its output and its errors in two files."""

    def __init__(self, *words: str, **environment: str) -> None:
        self._files = [Path(f"told-{time.monotonic_ns()}-{name}") for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "klrl", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
            )

    @property
    def out(self) -> str:
        return self._files[0].read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._files[1].read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            late = time.monotonic() > deadline or self.process.poll() is not None
            assert not late, self.out + self.err
            time.sleep(0.05)

    def ends(self, code: int) -> str:
        """What it said, once it has ended; nothing of it is Ray's."""
        assert self.process.wait(200) == code, self.out + self.err
        print(self.out, self.err, sep="")
        assert not RAYS_WORDS.search(self.out + self.err)
        return self.out

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def started(*words: str, **environment: str) -> Command:
        commands.append(Command(*words, **environment))
        return commands[-1]

    yield started
    for command in commands:
        command.stop()


def runs(folder: str) -> dict[str, RunFolder]:
    return {p.parent.name: RunFolder(p.parent) for p in Path(folder).glob("*/manifest.json")}


def frames_of(run: Path) -> list[int]:
    return [row["frames"] for row in rows_of(run)] if (run / "metrics.jsonl").exists() else []


def statuses(folder: str) -> dict[str, str]:
    told = json.loads(Path(folder, "sweep.json").read_text(encoding="utf-8"))["jobs"]
    return {job["name"]: job["status"] for job in told}


def bits_are_equal(a: Path | str, b: Path | str) -> None:
    words = [sys.executable, "-m", "klrl", "diff", str(a), str(b), "--bits"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    print(said.stdout, end="")
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.startswith("equal to the bit")


# ------------------------------------------------------------------------------- launcher=ray


def test_jobs_of_lost_machines_go_on_and_are_those_of_a_local_sweep_to_the_bit(
    machines: Machines, start
) -> None:
    """One of two machines dies, then the other; a third comes when the sweep has ended."""
    here = [machines.add(), machines.add()]
    grid = (*EAGER, "seed=0,1,2", "frames=25600", "checkpoint.every=20")
    on_ray = ("launcher=ray", f"launcher.address={machines.address}", "launcher.cpus_timeout=5")
    command = start("-m", "sweep=a", *grid, *on_ray)

    def running() -> list[str]:
        found = runs("outputs/a").items()
        return [name for name, run in found if run.status == "running" and run.checkpointed]

    command.wait_for(lambda: len(running()) == 2)
    ports = {process.pid for node in here for process in machines.processes(node)}
    assert listening(ports | {command.process.pid}) <= LOOPBACK
    first, other = running()
    pid = int(runs("outputs/a")[first].manifest["pid"])
    machines.kill(machines.of(pid))
    command.wait_for(lambda: "lost with" in command.out)
    lost = re.findall(r"^lost with .*: (\S+) \(at ([\d,]+) frames\)$", command.out, re.M)
    assert [name for name, _ in lost] == [first], "its neighbour on the other machine trains on"
    assert int(lost[0][1].replace(",", "")) > 0
    machines.kill(*machines.cluster.worker_nodes)
    said = command.ends(1)
    assert len(re.findall(r"^lost with", said, re.M)) == 2
    missing = "no machine of the Ray cluster has launcher.cpus_per_job=1"
    assert said.count(f"{missing}: waiting 5 s for machines that join it\n") == 1
    assert command.err == (
        f"klrl: failed: launcher=ray: {missing}, after 5 s of waiting; started again when one has, "
        "the sweep goes on\n"
    )
    assert {first: "interrupted", other: "interrupted"}.items() <= statuses("outputs/a").items()

    machines.add()
    before = {name: run.checkpointed for name, run in runs("outputs/a").items()}
    again = start("-m", "sweep=a", *grid, *on_ray)
    again.ends(0)
    assert again.err == ""
    start("-m", "sweep=b", *grid).ends(0)
    for seed in range(3):
        run = Path(f"outputs/a/seed={seed}")
        assert frames_of(run) == list(range(64, 25601, 64)), "no iteration is lost, none is twice"
        bits_are_equal(run, f"outputs/b/seed={seed}")
    log = Path("outputs/a", first, "log.txt").read_text(encoding="utf-8")
    resumed = [int(n.replace(",", "")) for n in re.findall(r"resumed at ([\d,]+)", log)]
    assert before[first] in resumed
    assert all(resumed), "with a checkpoint nothing begins at 0"
