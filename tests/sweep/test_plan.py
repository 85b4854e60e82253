"""``klrl plan``: the jobs and their states, and how many run at a time."""

from pathlib import Path

import pytest

from klrl.config import JoblibConfig, LauncherConfig, RayLauncherConfig
from tests.conftest import QUICK
from tests.runs.commands import exits
from tests.sweep.commands import SLURM


def test_at_a_time_is_what_the_launcher_says() -> None:
    """On no CUDA device and on 3."""
    for launcher, without, on_devices in (
        (LauncherConfig(name="local"), 1, 1),
        (JoblibConfig(7, 2, name="joblib"), 7, 7),
        (JoblibConfig(None, 2, name="joblib"), 2, 6),
        (SLURM, 5, 5),
        (RayLauncherConfig(None, 2, 1, 1, 60, name="ray"), None, None),
    ):
        assert [launcher.at_once(devices) for devices in (0, 3)] == [without, on_devices]


def planned(capsys, *words: str) -> str:
    assert exits("plan", *words) == 0
    return capsys.readouterr().out


def test_it_names_every_job_and_writes_nothing(capsys) -> None:
    words = ("-m", *QUICK, "kl.coef=0,1", "seed=0,1", "launcher=joblib", "launcher.n_jobs=3")
    assert planned(capsys, *words) == (
        "  kl.coef=0,seed=0  to start\n"
        "  kl.coef=0,seed=1  to start\n"
        "  kl.coef=1,seed=0  to start\n"
        "  kl.coef=1,seed=1  to start\n"
        "4 jobs, 4 to start; launcher=joblib, 3 at a time\n"
    )
    assert planned(capsys, *QUICK).endswith("1 job, 1 to start; launcher=local, 1 at a time\n")
    here = ("launcher=submitit", "launcher.cluster=local")
    assert "launcher=submitit, all at a time\n" in planned(capsys, "-m", *QUICK, "seed=0,1", *here)
    assert not Path("outputs").exists()


def test_a_search_is_told_by_its_trials(capsys) -> None:
    pytest.importorskip("optuna", reason="needs klrl[optuna]")
    words = (
        "-m",
        *QUICK,
        "search=optuna",
        "search.metric=reward/raw",
        "kl.coef=interval(0,1)",
        "seed=0,1,2",
    )
    told = "20 trials, with 3 seeds each; launcher=local, 1 at a time\n"
    assert planned(capsys, *words) == told


@pytest.mark.integration
def test_finished_jobs_are_told_from_those_to_run(capsys) -> None:
    exits("-m", "sweep=a", *QUICK, "seed=0,1")
    capsys.readouterr()
    assert planned(capsys, "-m", "sweep=a", *QUICK, "seed=0,1,2") == (
        "  seed=0  finished before\n"
        "  seed=1  finished before\n"
        "  seed=2  to start\n"
        "3 jobs, 2 finished before, 1 to start; launcher=local, 1 at a time\n"
    )


@pytest.mark.integration
def test_a_job_that_was_resumed_with_more_frames_says_so(capsys) -> None:
    """Its learning rate decayed over fewer frames first; the report and diff say so, too."""
    assert exits("-m", "sweep=a", *QUICK, "seed=0") == 0
    assert exits("resume=outputs/a/job", "frames=256") == 0
    capsys.readouterr()
    found = planned(capsys, "-m", "sweep=a", *QUICK, "frames=256", "seed=0,1").splitlines()
    assert found[:2] == ["  job     finished before  frames=128, then 256", "  seed=1  to start"]
