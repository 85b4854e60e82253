"""SLURM's answers and what follows from them; the whole of it: ``test_slurm.py``."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError, Interrupted
from klrl.base.interrupt import StopRequest
from klrl.config import LauncherConfig
from klrl.runs.folder import RunFolder
from klrl.sweep import queue, slurm
from klrl.sweep.jobs import Job, Outcome, make_jobs
from klrl.sweep.sweep_file import JobEntry, SweepFile
from tests.conftest import QUICK
from tests.runs.commands import child, exits
from tests.sweep.commands import FOLDER, SLURM, frames_of, resumed_at, wait_for

LOCAL = LauncherConfig(name="local")


@pytest.fixture
def command(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Put a command of SLURM's on the path, which prints a text; returns where its calls stand."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def put(name: str, text: str = "", code: int = 0) -> Path:
        path = tmp_path / "bin" / name
        calls = path.with_suffix(".calls")
        path.write_text(f"#!/bin/sh\necho \"$@\" >> {calls}\ncat <<'END'\n{text}\nEND\nexit {code}")
        path.chmod(0o755)
        return calls

    return put


#: As SLURM 22.05 tells of a job whose process asks, at the moment that it was told to stop.
TOLD = {
    "the warning signal": ("warned", "JobState=RUNNING Reason=None Restarts=0 PreemptTime=None"),
    "its time is over": ("warned", "JobState=COMPLETING Reason=TimeLimit Restarts=0"),
    "preempted, with a grace": ("warned", "JobState=RUNNING Restarts=0 PreemptTime=2026-11-23"),
    "preempted, to be cancelled": (
        "warned", "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-11-23T00:34:24",
    ),
    "preempted, and queued again": (
        "requeued", "JobState=COMPLETING Reason=None Restarts=1 EndTime=Unknown",
    ),
    "scancel": ("cancelled", "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None"),
    "scancel after a requeue": ("cancelled", "JobState=CANCELLED Reason=None Restarts=2"),
    "no answer": ("warned", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_why_a_job_was_told_to_stop(case: str, command) -> None:
    why, fields = TOLD[case]
    calls = command("scontrol", f"JobId=12 JobName=klrl-a {fields} Power= ")
    assert slurm.why_stopped("12_3", "2" if case.endswith("after a requeue") else "0") == why
    assert calls.read_text() == "--oneliner show job 12_3\n", "the array's number is all its jobs"


def test_the_queue_of_a_sweep_is_what_was_sent_from_its_folder(command, tmp_path) -> None:
    here = tmp_path / "a|b" / ".submitit"
    calls = command(
        "squeue",
        f"12_0|RUNNING|{here}/3f/.submission_file_1.sh\n"
        f"12_1|PENDING|{here}/.submission_file_1.sh\n"
        f"13|PENDING|{tmp_path}/other/.submitit/.submission_file_2.sh\n14|RUNNING|(null)\n",
    )
    assert slurm.in_queue(here) == {"12_0": "RUNNING", "12_1": "PENDING"}
    assert "--array" in calls.read_text()
    command("squeue", code=1)
    assert slurm.in_queue(here) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("MaxArraySize            = 4", 4), ("MaxArraySize = 0", 1), ("MaxJobCount = 9", 1001)],
)
def test_the_size_of_an_array_is_slurms(text: str, size: int, command) -> None:
    command("scontrol", f"Configuration data\n{text}\nMCSPlugin = none")
    assert slurm.max_array_size() == size


def test_what_sbatch_says_is_one_line() -> None:
    said = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job failed\n\n"
    assert (
        slurm.refusal(RuntimeError(said)) == "invalid partition specified: nope; Batch job failed"
    )
    said = "sbatch: unrecognized option '--qes=a'\nTry \"sbatch --help\" for more information"
    assert slurm.refusal(RuntimeError(said)) == "unrecognized option '--qes=a'"


def test_slurm_where_there_is_none_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr(slurm, "here", lambda: False)
    assert exits("-m", "sweep=a", *QUICK, "seed=0,1", "launcher=submitit") == 2
    assert "launcher.cluster=slurm: sbatch, srun and squeue are" in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.fixture
def two(settings, monkeypatch) -> tuple[list[Job], SweepFile]:
    """The jobs seed=0 and seed=1; seed=1, seed=2 and an unknown one were sent to the queue."""
    jobs = make_jobs(
        FOLDER, [(f"seed={n}", [f"seed={n}"], settings(f"seed={n}")) for n in range(3)]
    )
    entries = [JobEntry(job.name, [], *job.identity, queue=f"12_{n}") for n, job in enumerate(jobs)]
    (FOLDER / queue.SUBMISSIONS).mkdir(parents=True)
    monkeypatch.setattr(slurm, "here", lambda: True)
    return jobs[:2], SweepFile(FOLDER, ["klrl"], entries)


@pytest.mark.parametrize("config", [SLURM, LOCAL], ids=["slurm", "local"])
def test_what_is_in_the_queue_is_adopted_or_cancelled(two, config, monkeypatch) -> None:
    states = {"12_0": "RUNNING", "12_1": "PENDING", "12_2": "PENDING", "15": "PENDING"}
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "in_queue", lambda folder: states)
    monkeypatch.setattr(slurm, "cancel", cancelled.extend)
    jobs, lines = queue.settle(FOLDER, *two, config)
    if config is SLURM:
        assert [job.queued for job in jobs] == ["12_0", "12_1"]
        assert cancelled == ["15"], "nobody knows which job it is"
        assert "adopted from SLURM's queue: 2 (12_0, 12_1)" in lines
    else:
        assert [job.queued for job in jobs] == [None, None]
        assert sorted(cancelled) == ["12_1", "15"], "what runs is left to run"
    assert "seed=2 is in SLURM's queue too (12_2): left there" in lines


def test_a_job_of_other_settings_is_not_adopted(two, settings, monkeypatch) -> None:
    _, before = two
    before.write("klrl", before.entries)
    (job,) = make_jobs(FOLDER, [("seed=1", ["seed=1"], settings("seed=1", "frames=192"))])
    assert job.name == f"seed=1-{job.identity.settings}"
    monkeypatch.setattr(slurm, "in_queue", lambda folder: {"12_1": "PENDING"})
    monkeypatch.setattr(slurm, "cancel", lambda ids: None)
    (same,), lines = queue.settle(FOLDER, [job], before, SLURM)
    assert same.queued is None
    assert lines == ["seed=1 is in SLURM's queue too (12_1): left there"]


def test_a_queue_that_does_not_answer_may_hold_copies(two, monkeypatch) -> None:
    jobs, before = two
    monkeypatch.setattr(slurm, "in_queue", lambda folder: None)
    with pytest.raises(ConfigError, match="squeue fails"):
        queue.settle(FOLDER, jobs, before, SLURM)
    monkeypatch.setattr(slurm, "here", lambda: False)
    same, (line,) = queue.settle(FOLDER, jobs, before, LOCAL)
    assert same == jobs
    assert "cannot be seen from this machine" in line
    done = SweepFile(FOLDER, [], [replace(e, status="finished") for e in before.entries])
    assert queue.settle(FOLDER, jobs, done, LOCAL) == (jobs, [])


@pytest.mark.parametrize(
    ("state", "starts", "status", "refused"),
    [
        ("TIMEOUT", [0], "again", None),
        ("NODE_FAIL", [64, 64], "again", "Requested operation is not supported"),
        ("TIMEOUT", [64], "interrupted", None),
        ("PREEMPTED", [64, 64, 64], "interrupted", None),
        ("CANCELLED", [0], "interrupted", None),
        ("OUT_OF_MEMORY", [0], "failed", None),
        (None, [0], "failed", None),
    ],
)
def test_what_becomes_of_a_job_that_slurm_ended(
    state, starts, status, refused, settings, monkeypatch
) -> None:
    """It is in the queue; then squeue does not know it twice, and no outcome comes."""
    (job,) = make_jobs(FOLDER, [("job", [], settings())])
    RunFolder(job.folder).open(job.config)
    (job.folder / "checkpoints" / "last" / f"frames-{64:012d}").mkdir(parents=True)
    (FOLDER / queue.SUBMISSIONS).mkdir()
    (queue.submissions(FOLDER) / "12_starts.json").write_text(json.dumps(starts))
    again: list[str] = []

    def requeue(job: str) -> str | None:
        again.append(job)
        return refused

    monkeypatch.setattr(slurm, "in_queue", lambda folder: {})
    states = iter([state, "CANCELLED"])  # by a person, once it is in the queue again
    monkeypatch.setattr(slurm, "about", lambda queue: {"JobState": next(states)})
    monkeypatch.setattr(slurm, "requeue", requeue)
    monkeypatch.setattr(queue, "_POLL", 0.0)
    monkeypatch.setattr(queue, "_ASK", 0.0)
    *notices, outcome = queue.submitit(SLURM, [replace(job, queued="12")], FOLDER)
    assert isinstance(outcome, Outcome)
    assert again == (["12"] if status == "again" else [])
    assert len(notices) == len(again)
    assert outcome.status == ("interrupted" if status == "again" else status)
    assert outcome.error
    assert (outcome.error == refused) == (refused is not None)


def test_in_a_job_of_slurm_only_ctrl_c_stops_at_once(monkeypatch) -> None:
    """SLURM sends SIGTERM once when a preemption begins, and thrice when its grace is over."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with StopRequest() as stop:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
            signal.raise_signal(signum)
        assert stop.signum == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.services
@pytest.mark.timeout(200)
def test_a_warned_job_goes_on_in_submitits_stand_in_too() -> None:
    words = ("frames=12800", "checkpoint.every=1000000", "learner.compile=false")
    stand_in = ("launcher=submitit", "launcher.cluster=local")
    process = child("-m", "sweep=a", *QUICK, *words, *stand_in)
    run = RunFolder(FOLDER / "job")
    wait_for(lambda: run.metrics.exists() and len(run.metrics.read_bytes().splitlines()) > 2)
    os.kill(run.manifest["pid"], signal.SIGUSR2)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert frames_of(run.path) == list(range(64, 12801, 64))
    (frames,) = resumed_at("job")
    assert 0 < frames < 12800
