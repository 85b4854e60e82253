"""``python -m klrl.plan``: its arithmetic by hand, its words as a user gives them."""

import re
from pathlib import Path

import pytest

from klrl.__main__ import main as klrl_main
from klrl.config import JoblibConfig, LauncherConfig, RayLauncherConfig
from klrl.config.checks import to_config
from klrl.config.compose import Composer
from klrl.plan import main as plan_main
from klrl.sweep import plan
from klrl.sweep.plan import PlannedJob, job_seconds, kind_of, sweep_seconds
from klrl.sweep.probe import Cost
from tests.conftest import QUICK
from tests.sweep.commands import SLURM

#: 100 iterations of 64 frames; saved, and evaluated with 20 episodes, every tenth.
JOB = [w for w in QUICK if w != "eval.every=0"] + ["frames=6400", "eval.every=10", "eval.final=0"]
JOB += ["learner.compile=false"]
COST = Cost(3.0, job=2.0, iteration=0.1, episode=0.025, checkpoint=0.2, memory=10, longest=200)


def planned(*words: str, done: int = 0) -> PlannedJob:
    return PlannedJob("job", to_config(Composer().explained([*JOB, *words])), done)


def test_a_jobs_time_is_the_sum_of_its_parts() -> None:
    """2 + 100 x 0.1 + 10 x 20 x 0.025 + (1 + 10 + 10 / 2) x 0.2 = 20.2 s."""
    assert job_seconds(planned(), COST) == pytest.approx(20.2)
    assert job_seconds(planned("eval.every=0"), COST) == pytest.approx(2 + 10 + 11 * 0.2)
    half = job_seconds(planned(done=3200), COST)
    assert half == pytest.approx(2 + 5 + 2.5 + (1 + 5 + 2.5) * 0.2)
    # Six times eval.share=0.3 of 6,400 frames are 57 episodes of 200: of the last policy, the best.
    assert job_seconds(planned("eval.final=100"), COST) == pytest.approx(20.2 + 2 * 57 * 0.025)
    assert job_seconds(planned("eval.final=3"), COST) == pytest.approx(20.2 + 2 * 3 * 0.025)


def test_jobs_share_processes_and_pay_a_start_once() -> None:
    jobs = [planned(f"seed={seed}") for seed in range(3)]
    costs = {kind_of(jobs[0].config): COST}
    each = 20.2
    local, pool = (
        LauncherConfig(name="local"),
        JoblibConfig(name="joblib", n_jobs=2, jobs_per_device=1),
    )
    assert sweep_seconds(jobs, costs, local, 1) == pytest.approx(3 + 3 * each)
    assert sweep_seconds(jobs, costs, pool, 2) == pytest.approx(3 + 2 * each)
    assert sweep_seconds(jobs, costs, SLURM, 1) == pytest.approx(3 * (3 + each))
    assert sweep_seconds([], costs, local, 1) == 0


def test_at_a_time_is_what_the_launcher_says() -> None:
    """Of 9 jobs, on 4 cores, on no CUDA device and on 3."""
    for launcher, without, on_devices in (
        (LauncherConfig(name="local"), 1, 1),
        (JoblibConfig(7, 2, name="joblib"), 7, 7),
        (JoblibConfig(None, 2, name="joblib"), 2, 6),
        (SLURM, 5, 5),
        (RayLauncherConfig(None, None, 0.5, 1, 60, name="ray"), 8, 3),
        (RayLauncherConfig(None, 2, 1, 1, 60, name="ray"), 2, 2),
    ):
        assert [launcher.at_once(9, 4, devices) for devices in (0, 3)] == [without, on_devices]


def test_coefficients_and_seeds_cost_the_same_sizes_do_not() -> None:
    base = kind_of(planned().config)
    for same in ("seed=7", "kl.coef=3", "loss.dtarg=0.5", "frames=128"):
        assert kind_of(planned(same).config) == base, same
    for other in ("kl=legacy", "learner.epochs=3", "actor.hidden=[9]", "env=cartpole"):
        assert kind_of(planned(other).config) != base, other


def told(capsys, *words: str) -> str:
    plan_main(list(words))
    return capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_measures_and_writes_nothing(capsys, monkeypatch, at_once: int) -> None:
    monkeypatch.setattr(plan, "SECONDS", 0.2)
    words = ["launcher=joblib", f"launcher.n_jobs={at_once}"]
    plan_main(["-m", *JOB, "kl.coef=0,1", "seed=0,1", *words])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "measuring" in line]
    assert len(lines) in (1, 2), "once for all four; twice where it had to be compiled"
    assert all(("2 at a time" in line) == (at_once == 2) for line in lines)
    assert "4 jobs, 4 to run" in out
    (line,) = [x for x in out.splitlines() if "kl.coef=1,seed=1" in x or "kl.coef=0,seed" in x]
    assert re.search(r" 4 +6,400 +[\d,]+ +\d:\d\d +\d\.\d GB", line), line
    assert re.search(
        rf"expected: \d+:\d\d with launcher=joblib, {at_once} at a time, \d\.\d GB", out
    )
    assert not Path("outputs").exists()


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_finished_jobs_are_not_planned(capsys, monkeypatch) -> None:
    monkeypatch.setattr(plan, "_probe", lambda *_: COST)
    with pytest.raises(SystemExit):
        klrl_main(["-m", "sweep=a", *QUICK, "seed=0,1"])
    capsys.readouterr()
    assert (
        told(capsys, "-m", "sweep=a", *QUICK, "seed=0,1") == "2 jobs, 2 finished before, 0 to run\n"
    )
    assert "3 jobs, 2 finished before, 1 to run" in told(
        capsys, "-m", "sweep=a", *QUICK, "seed=0,1,2"
    )
