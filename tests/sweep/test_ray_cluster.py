"""``launcher=ray`` on a cluster of several machines that dies piece by piece.

The machines are ``ray.cluster_utils.Cluster``'s: raylets of one machine, on loopback. klrl is a
user's command beside them. ``make test-ray`` runs this file.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import QUICK
from tests.runs.commands import CHILDREN
from tests.sweep.commands import frames_of, jobs_of, resumed_at, told

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(400)]

EAGER = (*QUICK, "learner.compile=false")


def listening(pids: set[int]) -> set[str]:
    """Local addresses on which processes listen for TCP."""
    sockets = (each for pid in pids for each in psutil.Process(pid).net_connections("tcp"))
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


#: What Ray says of itself; a page of it begins with one of these words.
RAYS_WORDS = re.compile(r"raylet|ray\.|ray::|\(pid=|node_id|Node ID|Traceback|WARNING|core_worker")


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
                start_new_session=True,
            )
        CHILDREN.append(self.process)

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

    def processes(self) -> set[psutil.Process]:
        """It and every process that it has started."""
        process = psutil.Process(self.process.pid)
        return {process, *process.children(recursive=True)}


class Machines:
    """A cluster with a head that has no CPUs for others."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.address: str = cluster.address

    def add(self, cpus: int = 1) -> Any:
        """Another machine; what it runs has this process's environment."""
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


LOST = r"^lost with .*: (\S+) \(at ([\d,]+) frames\)$"


def bits_are_equal(a: Path | str, b: Path | str) -> None:
    words = [sys.executable, "-m", "klrl", "diff", str(a), str(b), "--bits"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    print(said.stdout, end="")
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.startswith("equal to the bit")


def test_jobs_of_lost_machines_go_on_and_are_those_of_a_local_sweep_to_the_bit(
    machines: Machines,
) -> None:
    """One of two machines dies, and another comes; then all die; one comes when all has ended."""
    here = [machines.add(), machines.add()]
    grid = (*EAGER, "seed=0,1,2", "frames=25600", "checkpoint.every=20")
    on_ray = ("launcher=ray", f"launcher.address={machines.address}", "launcher.cpus_timeout=5")
    command = Command("-m", "sweep=a", *grid, *on_ray)

    def running() -> list[str]:
        found = jobs_of().items()
        return [name for name, run in found if run.status == "running" and run.checkpointed]

    command.wait_for(lambda: len(running()) == 2)
    ports = {process.pid for node in here for process in machines.processes(node)}
    assert listening(ports | {command.process.pid}) <= LOOPBACK
    first = running()[0]
    machines.kill(machines.of(int(jobs_of()[first].manifest["pid"])))
    command.wait_for(lambda: "lost with" in command.out)
    ((name, frames),) = re.findall(LOST, command.out, re.M)
    assert name == first, "its neighbour on the other machine trains on"
    assert int(frames.replace(",", "")) > 0
    machines.add()
    command.wait_for(lambda: resumed_at(first))
    assert resumed_at(first) == [int(frames.replace(",", ""))]

    for node in list(machines.cluster.worker_nodes):
        machines.kill(node)
    said = command.ends(1)
    missing = "no machine of the Ray cluster has launcher.cpus_per_job=1"
    assert said.count(f"{missing}: waiting up to 5 s\n") == 1
    assert command.err == (
        f"klrl: failed: launcher=ray: {missing}; fix that, and start the sweep again to "
        "continue it\n"
    )
    # Between two machines a job may have begun beside the first ones, or ended.
    assert set(told().values()) <= {"interrupted", "waiting", "finished"}
    left = {name: run.checkpointed for name, run in jobs_of().items()}

    machines.add()
    again = Command("-m", "sweep=a", *grid, *on_ray)
    again.ends(0)
    assert again.err == ""
    Command("-m", "sweep=b", *grid).ends(0)
    for seed in range(3):
        run = Path(f"outputs/a/seed={seed}")
        assert frames_of(run) == list(range(64, 25601, 64)), "no iteration is lost, none is twice"
        bits_are_equal(run, f"outputs/b/seed={seed}")
        on = [frames for frames in resumed_at(run.name) if frames]
        assert left.get(run.name, 0) in (0, 25600, *on), "from its checkpoint, not from 0"


#: Of every Python process: the machine's name.
SITE = """
import os, platform
if "KLRL_TEST_HOST" in os.environ:
    platform.node = lambda: os.environ["KLRL_TEST_HOST"]
"""


def elsewhere(machines: Machines, monkeypatch, tmp_path) -> Any:
    """A machine of another name."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path]))
    with monkeypatch.context() as there:
        there.setenv("KLRL_TEST_HOST", "elsewhere")
        return machines.add()


def test_ctrl_c_stops_jobs_on_this_machine_and_on_others_with_checkpoints(
    machines: Machines, monkeypatch, tmp_path
) -> None:
    elsewhere(machines, monkeypatch, tmp_path)
    machines.add()
    words = (*EAGER, "seed=0,1,2", "frames=1e7", "checkpoint.every=1000000")
    address = f"launcher.address={machines.address}"
    command = Command("-m", "sweep=a", *words, "launcher=ray", address)
    command.wait_for(lambda: len(jobs_of()) == 2)
    both = jobs_of()
    command.wait_for(lambda: all(len(frames_of(run.path)) > 5 for run in both.values()))
    assert len({run.manifest["host"] for run in both.values()}) == 2
    command.process.send_signal(signal.SIGINT)
    said = command.ends(130)
    assert "stopping 1 job after their iteration" in command.err
    assert "also stopping jobs on other machines: 1\n" in said
    assert "stopped: 3 jobs: 2 interrupted, 1 waiting" in said
    for run in both.values():
        assert run.manifest["status"] == "interrupted"
        assert run.checkpointed == frames_of(run.path)[-1] > 0


def test_a_sweep_ends_in_a_line_with_checkpoints_where_the_head_is_gone(
    machines: Machines,
) -> None:
    """Ray would end it with a line of its own after 60 s."""
    machines.add(3)
    words = (*EAGER, "frames=1e7", "checkpoint.every=1000000")
    on_ray = ("launcher=ray", f"launcher.address={machines.address}", "launcher.cpus_timeout=5")
    sweep = Command("-m", "sweep=a", *words, *on_ray)
    sweep.wait_for(lambda: frames_of(Path("outputs/a/job")))
    machines.cluster.head_node.kill_gcs_server()
    away = f"the head of the Ray cluster ({machines.address}) does not answer"
    assert sweep.ends(1).count(f"{away}: waiting up to 5 s\n") == 1
    assert sweep.err == (
        f"klrl: failed: launcher=ray: {away}; fix that, and start the sweep again to continue it\n"
    )
    assert told() == {"job": "interrupted"}
