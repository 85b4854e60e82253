"""``launcher=submitit`` on a real SLURM, which ``make test-slurm`` (``.ci/slurm``) starts."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import QUICK
from tests.runs.commands import child
from tests.sweep import commands
from tests.sweep.commands import FOLDER, frames_of, jobs_of, resumed_at, told

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif("KLRL_SLURM" not in os.environ, reason="make test-slurm runs it"),
]

#: No checkpoint of its own accord: what is kept is what a signal made it write.
#: A compiler beside the run would get its signals, too.
RARE = ("checkpoint.every=1000000", "learner.compile=false")


def words(*more: str, name: str = "a", cpus: int = 1) -> list[str]:
    queue = ["launcher=submitit", f"launcher.cpus_per_task={cpus}", "launcher.mem_gb=0.5"]
    return ["-m", f"sweep={name}", *QUICK, *queue, *more]


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def queue() -> dict[str, str]:
    lines = slurm("squeue", "--array", "--noheader", "--format=%i %T").splitlines()
    return dict(line.split() for line in lines)


@pytest.fixture(autouse=True)
def _empty_queue(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    yield
    if left := queue():  # one may be gone by now
        subprocess.run(["scancel", "--quiet", *left], check=False)
    wait_for(lambda: not queue())


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    commands.wait_for(condition, seconds, lambda: f"in the queue: {queue()}")


def jobs() -> dict[str, dict]:
    told = json.loads((FOLDER / "sweep.json").read_text(encoding="utf-8"))["jobs"]
    return {job["name"]: job for job in told}


def trains(name: str, beyond: int = 0) -> Callable[[], bool]:
    """Whether a job of the sweep has rows beyond some frames."""
    return lambda: max(frames_of(FOLDER / name), default=0) > beyond


def ends(process: subprocess.Popen, code: int) -> str:
    said, _ = process.communicate(timeout=240)
    print(said)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert "WARNING" not in said, "without accounting there is nothing to warn of"
    assert "accounting" not in said
    return said


def starts() -> list[Path]:
    return list(Path("outputs/a/.submitit").glob("*/*_starts.json"))


def test_a_preempted_job_goes_on_where_it_was_and_the_sweep_waits_for_it() -> None:
    process = child(*words("seed=0", "frames=48000", *RARE, cpus=4))
    wait_for(trains("job"))
    for count in range(2):
        wait_for(lambda count=count: len(resumed_at("job")) == count)
        wait_for(trains("job", beyond=max(resumed_at("job"), default=0)))
        blocker = slurm(
            "sbatch", "--parsable", "--partition=high", "--ntasks=4", "--time=1",
            "--output=/dev/null", "--wrap=sleep 2",
        ).strip()  # fmt: skip
        wait_for(lambda blocker=blocker: blocker not in queue())
    said = ends(process, 0)
    run = jobs_of()["job"]
    assert "job: in the queue again, at " in said or len(resumed_at("job")) == 2
    assert run.manifest["frames"] == 48000
    assert frames_of(run.path) == list(range(64, 48001, 64)), "no iteration is lost, none is twice"
    first, second = resumed_at("job")
    assert 0 < first < second
    assert len(run.manifest["resumed"]) == 2


def test_a_job_at_its_time_limit_goes_on_where_it_was_however_often() -> None:
    """SLURM warns up to a minute earlier than it was asked to."""
    limit = ("launcher.timeout_min=1", "launcher.slurm={signal: USR2@15}")
    process = child(*words("seed=0", "frames=64000000", *RARE, *limit))
    wait_for(lambda: Path("outputs/a/job/log.txt").exists())
    wait_for(lambda: len(resumed_at("job")) == 2, 200)
    process.send_signal(signal.SIGINT)
    ends(process, 130)
    run = jobs_of()["job"]
    assert 0 < resumed_at("job")[0] < resumed_at("job")[1]
    assert frames_of(run.path) == list(range(64, run.checkpointed + 1, 64))


def test_a_job_that_a_person_cancels_ends_no_other_and_goes_on_when_asked_for() -> None:
    process = child(*words("seed=0,1", "frames=19200", *RARE))
    wait_for(trains("seed=1"))
    wait_for(lambda: "queue" in jobs()["seed=1"])
    slurm("scancel", jobs()["seed=1"]["queue"])
    said = ends(process, 1)
    assert "seed=1: interrupted: cancelled in SLURM's queue" in said
    assert told() == {
        "seed=0": "finished",
        "seed=1": "interrupted",
    }
    kept = jobs_of()["seed=1"].manifest["frames"]
    assert kept > 0, "it was given time for a checkpoint"
    assert "1 finished before, 1 to resume" in ends(
        child(*words("seed=0,1", "frames=19200", *RARE)), 0
    )
    assert resumed_at("seed=1") == [kept]
    assert frames_of(FOLDER / "seed=1") == list(range(64, 19201, 64))


def test_more_jobs_than_an_array_takes_go_in_several() -> None:
    size = int(re.search(r"MaxArraySize\s*=\s*(\d+)", slurm("scontrol", "show", "config"))[1])
    assert size == 4
    process = child(*words("seed=range(6)", "frames=64", "launcher.array_parallelism=4"))
    assert "6 jobs: 6 finished" in ends(process, 0)
    assert sorted(job["queue"].split("_")[-1] for job in jobs().values()) == list("001123")
    files = [path.read_text() for path in Path("outputs/a/.submitit").glob("*/*_submission.sh")]
    arrays = sorted(re.findall(r"--array=(\S+)", " ".join(files)))
    assert arrays == ["0-1%2", "0-3%2"], "together they run no more than array_parallelism"


def test_ctrl_c_stops_running_jobs_in_good_order_and_takes_the_others_out() -> None:
    process = child(*words("seed=0,1", "frames=640000", *RARE, cpus=4))
    wait_for(trains("seed=0"))
    process.send_signal(signal.SIGINT)
    said = ends(process, 130)
    assert "stopping the jobs in the queue after their iteration" in said
    run = jobs_of()["seed=0"]
    assert run.status == "interrupted"
    assert run.checkpointed == frames_of(run.path)[-1] > 0
    assert told() == {
        "seed=0": "interrupted",
        "seed=1": "waiting",
    }
    wait_for(lambda: not queue(), 20)


def test_a_sweep_started_again_adopts_what_is_in_the_queue() -> None:
    """One copy runs, one waits: neither is sent again. Another command's job is left alone."""
    again = words("seed=0,1", "frames=25600", *RARE, cpus=4)
    process = child(*words("seed=0,1,2", "frames=25600", *RARE, cpus=4))
    wait_for(trains("seed=0"))
    process.kill()
    process.communicate()
    ids = {name: job["queue"] for name, job in jobs().items()}
    assert sorted(queue()) == sorted(ids.values())
    slurm("scontrol", "hold", ids["seed=2"])

    other = words("seed=1", "frames=128", cpus=4)
    process = child(*again)
    wait_for(lambda: "seed=1" in jobs_of(), 200)
    said = ends(process, 0)
    assert "2 jobs, 2 in the queue already" in said
    assert f"adopted from SLURM's queue: 2 ({ids['seed=0']}, {ids['seed=1']})" in said
    assert f"seed=2 is in SLURM's queue too ({ids['seed=2']}): left there" in said
    assert {name: job["queue"] for name, job in jobs().items()} == ids, "none was sent again"
    for name in ("seed=0", "seed=1"):
        assert frames_of(FOLDER / name) == list(range(64, 25601, 64))
        assert jobs_of()[name].manifest["resumed"] == []
    wait_for(lambda: list(queue()) == [ids["seed=2"]], 20)

    # Other frames under that name are another job, which has a folder of its own.
    assert exits_with(other) == 0
    assert jobs()["seed=2"]["queue"] == ids["seed=2"]
    # Started again without the queue, its copy is taken out first.
    local = [each for each in words("seed=2", "frames=64") if not each.startswith("launcher")]
    assert exits_with([*local, "launcher=local"]) == 0
    assert list(queue()) == [ids["seed=2"]], "it is of other frames"


def exits_with(given: list[str]) -> int:
    process = child(*given)
    print(process.communicate(timeout=200)[0])
    return process.returncode
