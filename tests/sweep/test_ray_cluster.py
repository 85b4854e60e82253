"""``launcher=ray`` and ``collector=ray`` on a cluster of several machines that dies piece by piece.

The machines are ``ray.cluster_utils.Cluster``'s: raylets of one machine, on loopback. klrl is a
user's command beside them. ``make test-ray`` runs this file.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from klrl.runs.folder import RunFolder
from tests.conftest import QUICK
from tests.control.test_ray_run import LOOPBACK, Command, listening
from tests.runs.commands import rows_of, timeless
from tests.sweep.commands import frames_of, jobs_of, resumed_at, told

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(400)]

EAGER = (*QUICK, "learner.compile=false")


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
    assert said.count(f"{missing}: waiting 5 s for it to change\n") == 1
    assert command.err == (
        f"klrl: failed: launcher=ray: {missing}; started again when that has changed, the sweep "
        "goes on\n"
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
    assert "stopping 1 jobs after their iteration" in command.err
    assert "likewise jobs on other machines: 1\n" in said
    assert "stopped: 3 jobs: 2 interrupted, 1 waiting" in said
    for run in both.values():
        assert run.manifest["status"] == "interrupted"
        assert run.checkpointed == frames_of(run.path)[-1] > 0


#: klrl, with a worker killed before a rollout is asked for: python doomed.py WORKER ROLLOUT WORDS
DOOMED = """
import os, signal, sys
from klrl.__main__ import main
from klrl.control.ray_rollout import RayRollout
worker, number = int(sys.argv[1]), int(sys.argv[2])
collect, count = RayRollout.collect, 0
def doomed(self):
    global count
    if count == number:
        actor = self._workers[worker]
        os.kill(self._ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    count += 1
    return collect(self)
RayRollout.collect = doomed
main(sys.argv[3:])
"""


def doomed(worker: int, rollout: int, *words: str) -> list[dict]:
    Path("doomed.py").write_text(DOOMED)
    folder = Path(f"doomed-{rollout}")
    command = [sys.executable, "doomed.py", str(worker), str(rollout), *words]
    subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, stdout=subprocess.DEVNULL)
    return timeless(rows_of(folder))


def test_a_run_outlives_a_machine_of_its_workers_ends_without_cpus_and_goes_on(
    machines: Machines,
) -> None:
    """Three machines, two workers: one machine dies, then another, and there is no room left."""
    for _ in range(3):
        machines.add()
    words = (*EAGER, "env.num_envs=4", "collector=ray", "collector.workers=2")
    words = (*words, "collector.steps=100", "frames=24000", "checkpoint.every=1000000")
    command = Command(
        *(*words, "hydra.run.dir=run", "collector.cpus_timeout=5"),
        RAY_ADDRESS=machines.address,
    )
    run = Path("run")

    def kill_one(rows: int) -> None:
        """A machine with a worker, after so many more rows."""
        before = len(frames_of(run))
        command.wait_for(lambda: len(frames_of(run)) >= before + rows)
        every = {n: machines.processes(n) for n in machines.cluster.worker_nodes}
        used = [n for n, p in every.items() if any("RolloutWorker" in one.name() for one in p)]
        assert len(used) == 2
        machines.kill(used[0])

    kill_one(10)
    command.wait_for(lambda: "is lost" in command.out)
    (worker,) = re.findall(
        r"^worker (\d) is lost: a new one plays its part of this rollout$", command.out, re.M
    )
    kill_one(20)
    said = command.ends(1)
    lacks = "the Ray cluster lacks 1 of the 2 CPUs that the workers ask for"
    assert said.count(f"{lacks}: waiting 5 s for it to change\n") == 1
    assert command.err == (
        f"klrl: failed: collector=ray: {lacks}; resume=RUN goes on when that has changed, or on "
        "another cluster\n"
    )
    frames = frames_of(run)
    assert frames == [400 * (i + 1) for i in range(len(frames))]
    assert RunFolder(run).checkpointed == frames[-1], "all that was learned is kept"

    # The same as where only a process dies, before the same rollout; and until then as if none did.
    rows, peace = timeless(rows_of(run)), doomed(0, -1, *words)
    first = next(i for i, (a, b) in enumerate(zip(rows, peace, strict=False)) if a != b)
    assert first >= 10
    assert rows == doomed(int(worker), first, *words)[: len(rows)]

    # On the cluster with a new machine, and without any cluster.
    shutil.copytree(run, "alone")
    machines.add()
    Command("resume=run", RAY_ADDRESS=machines.address).ends(0)
    Command("resume=alone").ends(0)
    assert frames_of(run) == list(range(400, 24001, 400))
    bits_are_equal(run, "alone")


def test_a_sweep_and_a_run_end_in_a_line_with_checkpoints_where_the_head_is_gone(
    machines: Machines,
) -> None:
    """Ray would end both with a line of its own after 60 s, and the run without a checkpoint."""
    machines.add(3)
    words = (*EAGER, "frames=1e7", "checkpoint.every=1000000")
    on_ray = ("launcher=ray", f"launcher.address={machines.address}", "launcher.cpus_timeout=5")
    sweep = Command("-m", "sweep=a", *words, *on_ray)
    workers = ("collector=ray", "collector.workers=2", "collector.cpus_timeout=5")
    run = Command(*words, *workers, "hydra.run.dir=run", RAY_ADDRESS=machines.address)
    sweep.wait_for(lambda: frames_of(Path("outputs/a/job")))
    run.wait_for(lambda: frames_of(Path("run")))
    machines.cluster.head_node.kill_gcs_server()
    away = f"the head of the Ray cluster ({machines.address}) does not answer"
    for command in (sweep, run):
        assert command.ends(1).count(f"{away}: waiting 5 s for it to change\n") == 1
    assert sweep.err == (
        f"klrl: failed: launcher=ray: {away}; started again when that has changed, the sweep goes "
        "on\n"
    )
    assert run.err == (
        f"klrl: failed: collector=ray: {away}; resume=RUN goes on when that has changed, or on "
        "another cluster\n"
    )
    assert told() == {"job": "interrupted"}
    assert RunFolder(Path("run")).checkpointed == frames_of(Path("run"))[-1] > 0
