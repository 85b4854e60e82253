"""Jobs elsewhere: in processes of joblib, submitit and Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from klrl.config import JoblibConfig
from klrl.config.compose import job_config
from klrl.report.runs import find_runs
from klrl.runs.owner import living_owner
from klrl.sweep.jobs import Job
from klrl.sweep.launchers import joblib
from klrl.sweep.worker import hold_device
from tests.conftest import QUICK
from tests.runs.commands import exits, rows_of, timeless
from tests.sweep.commands import jobs_of, told, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.services
@pytest.mark.parametrize(
    "launcher",
    [
        ("launcher=joblib", "launcher.n_jobs=2"),
        pytest.param(("launcher=submitit", "launcher.cluster=local"), marks=pytest.mark.slow),
        pytest.param(("launcher=ray", "launcher.cpus=2"), marks=pytest.mark.slow),  # in .ci/smoke
    ],
    ids=lambda words: words[0].split("=")[1],
)
def test_every_launcher_gives_the_rows_of_the_local_one(capfd, launcher) -> None:
    bad = ("optim.lr=1e-3,1e30", "loss.normalize_advantage=false")
    assert exits("-m", "sweep=here", *QUICK, *bad) == 1
    assert exits("-m", "sweep=there", *QUICK, *bad, *launcher) == 1
    here, there = jobs_of("outputs/here"), jobs_of("outputs/there")
    assert sorted(here) == sorted(there)
    for name, run in here.items():
        assert run.status == there[name].status
        assert timeless(rows_of(run.path)) == timeless(rows_of(there[name].path))
        assert (there[name].path / "log.txt").stat().st_size > 0
        words = list(run.manifest["argv"])
        assert words == there[name].manifest["argv"]
        assert words[:3] == ["python", "-m", "klrl"]
    assert told("outputs/there") == told("outputs/here")
    assert "NonFiniteError" in capfd.readouterr().out
    assert len(find_runs(["outputs/there"]).runs) == 2


@pytest.mark.services
def test_joblib_brings_back_every_one_of_many_short_jobs(tmp_path) -> None:
    """Outcomes come in while further jobs are still being handed out.

    The jobs were checked on another machine, which had an environment that this one lacks.
    """
    config = job_config(["env=gym", "env.id=Penduulm-v1"])
    jobs = [
        Job(f"{i}", tmp_path / f"{i}", (), config, "a", tmp_path, "elsewhere") for i in range(16)
    ]
    outcomes = list(
        joblib(JoblibConfig(name="joblib", n_jobs=2, jobs_per_device=1), jobs, tmp_path)
    )
    assert {o.name for o in outcomes} == {job.name for job in jobs}
    assert {o.status for o in outcomes} == {"refused"}
    assert "Did you mean: `Pendulum`?" in str(outcomes[0].error)


def test_each_process_has_a_slot_of_its_own_until_it_ends(tmp_path, monkeypatch) -> None:
    """Four slots over three devices: all are taken, the second process ends, another one comes."""
    devices: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    hold = hold_device.__wrapped__
    files = [hold(tmp_path, (0, 1, 2, 0)) for _ in range(4)]
    files[1].close()
    files += [hold(tmp_path, (0, 1, 2, 0)) for _ in range(2)]
    assert devices == [0, 1, 2, 0, 1]
    assert [file.closed for file in files] == [False, True, False, False, False, True]
    for file in files:
        file.close()


@pytest.mark.services
def test_ray_gives_each_job_a_gpu_and_none_to_those_of_the_cpu(tmp_path) -> None:
    """Ray believes in two GPUs; a job prints which it sees, in a process that no other job had."""
    (tmp_path / "seen.py").write_text(
        "import os, gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "print('GPU', os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)\n"
        "gymnasium.register('Seen-v0', 'seen:PendulumEnv', max_episode_steps=200)\n"
    )
    words = [w for w in QUICK if w != "env=pendulum"] + ["env=gym", "env.id=seen:Seen-v0"]
    words += ["seed=0,1", "device=cpu,auto", "launcher=ray", "launcher.cpus=4"]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.run(
        [sys.executable, "-m", "klrl", "-m", "sweep=a", *words],
        env={**os.environ, "PYTHONPATH": path, "RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert "4 to start\njobs at once: 2, 1 on each Ray GPU\n" in process.stdout
    seen = {
        path.parent.name: re.findall("^GPU (.*)$", path.read_text(encoding="utf-8"), re.M)
        for path in Path("outputs/a").glob("*/log.txt")
    }
    on_gpus = sorted(seen[f"seed={seed},device=auto"] for seed in (0, 1))
    assert on_gpus == [["0"], ["1"]]
    assert {each for seed in (0, 1) for each in seen[f"seed={seed},device=cpu"]} <= {"None", ""}


@pytest.mark.services
def test_joblibs_jobs_end_with_a_sweep_that_is_killed() -> None:
    """A SIGKILL, which nobody can pass on; they wrote checkpoints, and no third one began."""
    words = ("frames=64000000", "checkpoint.every=1000000", "learner.compile=false", "seed=0,1,2")
    # No fork: joblib hangs in one of a process that has used it.
    command = [sys.executable, "-m", "klrl", "-m", "sweep=a", *QUICK, *words]
    process = subprocess.Popen([*command, "launcher=joblib", "launcher.n_jobs=2"])
    wait_for(lambda: sum(run.metrics.exists() for run in jobs_of().values()) == 2)
    process.kill()
    process.wait()
    paths = [run.path for run in jobs_of().values()]
    wait_for(lambda: not any(map(living_owner, paths)), 60)
    runs = jobs_of()
    assert len(runs) == 2
    for run in runs.values():
        assert run.manifest["status"] == "interrupted"
        assert run.checkpointed == rows_of(run.path)[-1]["frames"] > 0


@pytest.mark.services
def test_a_worker_that_dies_takes_no_other_job_with_it(tmp_path) -> None:
    """Its neighbour, here still running at each of its deaths, is taken up again and finishes."""
    deadly = tmp_path / "deadly.py"
    deadly.write_text(
        "import os, time, gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "class Deadly(PendulumEnv):\n"
        "    def __init__(self, dies=False, **kw):\n"
        "        super().__init__(**kw); self.dies, self.n = dies, 0\n"
        "    def step(self, action):\n"
        "        self.n += 1\n"
        "        if self.dies and self.n > 20: os._exit(9)\n"
        "        if not self.dies and self.n % 20 == 0: time.sleep(0.3)\n"
        "        return super().step(action)\n"
        "gymnasium.register('Deadly-v0', 'deadly:Deadly', max_episode_steps=200)\n"
    )
    words = [w for w in QUICK if w != "env=pendulum"]
    words += ["env=gym", "env.id=deadly:Deadly-v0", "env.kwargs.dies=true,false"]
    process = subprocess.run(
        [sys.executable, "-m", "klrl", "-m", "sweep=a", *words, "launcher=joblib"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert process.returncode == 1, process.stdout + process.stderr
    assert told() == {"env.kwargs.dies=False": "finished", "env.kwargs.dies=True": "failed"}
    assert "lost with their process (killed, or out of memory?); restarting: " in process.stdout
