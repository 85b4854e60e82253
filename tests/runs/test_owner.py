"""One process writes a run folder: who owns it, and when it is taken over."""

import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError, OwnerError
from klrl.runs import owner
from klrl.runs.folder import RunFolder
from klrl.runs.owner import (
    OWNER_FILE,
    SILENT_SECONDS,
    Claim,
    OwnedElsewhere,
    living_owner,
    owning,
    read_owner,
)
from tests.conftest import QUICK
from tests.runs.commands import child, exits, manifest_of, rows_of

RUN = Path("run")
LONG = [word for word in QUICK if not word.startswith("frames")]
LONG += ["frames=10_000_000", "learner.compile=false", "checkpoint.every=1000000"]


def name_owner(silent: int = 0, **changes: object) -> None:
    """An owner file as process 4 of another machine would have left it, silent for some seconds."""
    entry = {"host": "elsewhere", "pid": 4, "job": None, "restarts": 0}
    entry |= {"heartbeat": int(time.time()) - silent}
    RUN.mkdir(exist_ok=True)
    (RUN / OWNER_FILE).write_text(json.dumps(entry | changes))


def owner_now() -> dict:
    return json.loads((RUN / OWNER_FILE).read_text())


def owned() -> AbstractContextManager[Claim]:
    return owning(RUN, "folder=run")


@pytest.fixture
def locked() -> Iterator[None]:
    """The lock as a process of this machine holds it."""
    RUN.mkdir()
    with (RUN / OWNER_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def without_locks(monkeypatch) -> None:
    """As on Lustre without its option flock."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)


def test_the_owner_is_named_while_the_folder_is_owned_and_not_after(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with owned():
        told = owner_now()
        assert abs(told.pop("heartbeat") - time.time()) < 5
        assert told == {
            "host": platform.node(),
            "pid": os.getpid(),
            "job": "77",
            "restarts": 2,
        }
    assert not RUN.exists(), "it was made for nothing"


def test_the_heartbeat_is_renewed(monkeypatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    with owned():
        first = owner_now()["heartbeat"]
        deadline = time.monotonic() + 10
        while owner_now()["heartbeat"] == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert owner_now()["heartbeat"] > first


@pytest.mark.usefixtures("locked")
@pytest.mark.parametrize("silent", [0, 10 * SILENT_SECONDS])
@pytest.mark.parametrize("host", [platform.node(), "elsewhere"])
def test_the_lock_alone_refuses_a_second_owner(host: str, silent: int) -> None:
    """Whatever the file says: a process that is suspended is silent, and holds the lock."""
    name_owner(silent, host=host)
    assert living_owner(RUN) is not None
    with pytest.raises(OwnedElsewhere, match=r"process 4 .* is still running it"), owned():
        pass


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_heartbeat_decides() -> None:
    for host in (platform.node(), "elsewhere"):
        name_owner(SILENT_SECONDS - 9, host=host)
        assert living_owner(RUN) is not None
        with pytest.raises(OwnedElsewhere, match="process 4 "), owned():
            pass
        name_owner(SILENT_SECONDS + 1, host=host)
        assert living_owner(RUN) is None
        with owned() as claim:
            claim.check()
            assert living_owner(RUN).pid == os.getpid()
        assert not (RUN / OWNER_FILE).exists()


def test_who_asks_for_the_owner_is_in_nobodys_way() -> None:
    """A process that asks has the lock for an instant."""
    name_owner(host=platform.node())
    with (RUN / OWNER_FILE).open() as asking:
        fcntl.flock(asking, fcntl.LOCK_EX)
        threading.Timer(0.1, fcntl.flock, (asking, fcntl.LOCK_UN)).start()
        with owned():
            assert owner_now()["pid"] == os.getpid()


@pytest.mark.parametrize("alive", [{"silent": SILENT_SECONDS // 3}, {"job": "77"}, {"job": "78"}])
def test_a_living_owner_keeps_the_folder(alive, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")  # 77: two steps of one job
    name_owner(**alive)
    before = (RUN / OWNER_FILE).read_bytes()
    assert living_owner(RUN).pid == 4
    with pytest.raises(OwnedElsewhere) as refused, owned():
        pass
    line = str(refused.value)
    assert "\n" not in line
    assert f"process {owner_now()['pid']} (" in line
    assert f"on {owner_now()['host']}, seen " in line
    assert line.endswith(f"wait, or stop it (or, if there is none, delete {RUN / OWNER_FILE})")
    assert (RUN / OWNER_FILE).read_bytes() == before


@pytest.mark.parametrize(
    "dead",
    [
        {"host": platform.node()},
        {"silent": SILENT_SECONDS + 1},
        {"job": "77", "restarts": 0},
    ],
)
def test_a_dead_owner_is_taken_over_and_one_line_says_so(dead, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    name_owner(**dead)
    assert living_owner(RUN) is None
    with owned():
        assert owner_now()["pid"] == os.getpid()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run: taken over from process 4 (")


ENDLESS = '{"host": "", "pid": 1e999, "job": 1, "restarts": 0, "heartbeat": 0}'
NOBODY = ["", "{", "[]", '{"pid": 1}', "\0\0", "[" * 4000, ENDLESS]


@pytest.mark.parametrize("content", NOBODY)
def test_an_owner_file_that_names_nobody_owns_nothing(content: str, capsys) -> None:
    RUN.mkdir()
    (RUN / OWNER_FILE).write_text(content)
    with owned():
        assert owner_now()["pid"] == os.getpid()
    assert not capsys.readouterr().err


def test_who_slept_while_another_took_over_writes_nothing_more() -> None:
    with owned() as claim:
        claim.check()
        name_owner()
        with pytest.raises(OwnerError, match=r"process 4 \(on elsewhere"):
            claim.check()
    assert owner_now()["pid"] == 4, "it is the other's"


@pytest.mark.parametrize("move", [shutil.rmtree, lambda run: run.rename("elsewhere")])
def test_a_run_whose_folder_is_deleted_or_moved_ends(move) -> None:
    with owned() as claim:
        claim.check()
        move(RUN)
        with pytest.raises(OwnerError, match="run: was moved or deleted"):
            claim.check()
    assert not RUN.exists()


def _nothing() -> None: ...


def _folder() -> None:
    (RUN / OWNER_FILE).mkdir()


def _pipe() -> None:
    os.mkfifo(RUN / OWNER_FILE)


def _another() -> None:
    name_owner()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_nothing, _folder, _pipe, _another])
def test_an_owner_whose_file_is_gone_has_lost_the_folder(make) -> None:
    """Another run may be there; what stands in its place stays."""
    told = r"process 4 \(on elsewhere.*took the" if make is _another else "or its owner.json was"
    with owned() as claim:
        (RUN / OWNER_FILE).unlink()
        make()
        with pytest.raises(OwnerError, match=told):
            claim.check()
    assert (RUN / OWNER_FILE).exists() == (make is not _nothing)


@pytest.mark.parametrize(
    "name",
    [
        *(OWNER_FILE, "metrics.jsonl", "samples.jsonl", "log.txt"),
        *(".hydra", "tensorboard", "videos", "checkpoints/last"),
    ],
)
def test_nothing_of_somebody_else_is_written_through_a_link(name: str) -> None:
    Path("precious").mkdir()
    (RUN / name).parent.mkdir(parents=True)
    (RUN / name).symlink_to(Path("precious").resolve())
    with pytest.raises(ConfigError, match=rf"folder=run: {name} is a link"), RunFolder(RUN).owned():
        pass
    assert not list(Path("precious").iterdir())


def test_another_runs_checkpoints_are_not_written_through_a_link() -> None:
    Path("other/checkpoints").mkdir(parents=True)
    RUN.mkdir()
    (RUN / "checkpoints").symlink_to(Path("other/checkpoints").resolve())
    with RunFolder(RUN).owned():
        pass  # a folder on a larger disk
    Path("other/metrics.jsonl").write_text("")
    with (
        pytest.raises(ConfigError, match="checkpoints is a link into the run"),
        RunFolder(RUN).owned(),
    ):
        pass


@pytest.mark.timeout(20)
def test_an_owner_file_that_is_a_pipe_is_not_waited_for() -> None:
    RUN.mkdir()
    os.mkfifo(RUN / OWNER_FILE)
    assert read_owner(RUN) is None
    with (
        pytest.raises(ConfigError, match="owner.json is not a regular file"),
        RunFolder(RUN).owned(),
    ):
        pass


def test_a_child_that_outlives_the_owner_does_not_keep_the_lock() -> None:
    code = (
        "import os, time\nfrom pathlib import Path\nfrom klrl.runs.owner import Claim\n"
        "Path('run').mkdir()\nClaim(Path('run'), 'run')\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n    os.write(write, b'1')\n    time.sleep(60)\n    os._exit(0)\n"
        "os.read(read, 1)\n"  # the child is past what runs in it after the fork
        "os.kill(os.getpid(), 9)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    assert process.wait(timeout=60) == -signal.SIGKILL
    try:
        with owned():
            assert owner_now()["pid"] == os.getpid()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_the_owner_removes_what_a_kill_left_and_nothing_else() -> None:
    left = ("checkpoints/.staging-0",)
    kept = ("checkpoints/last/frames-000000000064", "mine.tmp", "checkpoints/notes")
    for name in (*left, *kept):
        (RUN / name).mkdir(parents=True)
        (RUN / name / "x").touch()
    (RUN / "manifest.tmp").touch()
    name_owner()
    with pytest.raises(ConfigError), RunFolder(RUN).owned():
        pass
    assert all((RUN / name / "x").exists() for name in (*left, *kept))
    (RUN / OWNER_FILE).unlink()
    with RunFolder(RUN).owned():
        assert not any((RUN / name).exists() for name in (*left, "manifest.tmp"))
        assert all((RUN / name / "x").exists() for name in kept)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_of_two_resumes_at_once_one_trains_and_the_other_is_refused() -> None:
    exits(*QUICK, "hydra.run.dir=run")
    both = [child("resume=run", "frames=10_000_000") for _ in range(2)]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and all(each.poll() is None for each in both):
        time.sleep(0.1)
    both.sort(key=lambda each: each.poll() is None)
    told, _ = both[0].communicate(timeout=10)
    assert both[0].returncode == 2, told
    assert told.count("\n") == 1
    assert f"process {both[1].pid} (on {platform.node()}, seen " in told
    while len(rows_of(RUN)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert RunFolder(RUN).status == "running"
    assert exits("evaluate", "run", "--episodes", "1") == 0
    assert exits("resume=run") == 2
    both[1].send_signal(signal.SIGTERM)
    both[1].communicate(timeout=60)
    assert both[1].returncode == 143
    frames = [row["frames"] for row in rows_of(RUN)]
    assert frames == list(range(64, 64 * len(frames) + 1, 64)), "every row, once"
    assert len(manifest_of(RUN)["resumed"]) == 1
    assert not (RUN / OWNER_FILE).exists()


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_fresh_run_leaves_the_folder_of_one_that_is_beginning_alone(capsys) -> None:
    RUN.mkdir()
    (RUN / "notes").touch()
    with owned():  # its manifest is not yet written
        before = sorted(RUN.iterdir())
        assert exits(*QUICK, "hydra.run.dir=run") == 2
        assert sorted(RUN.iterdir()) == before
        assert exits("-m", *QUICK, "sweep=s", "seed=0") == 0, "another folder"
    assert "is still running it" in capsys.readouterr().err
    assert exits(*QUICK, "hydra.run.dir=run") == 0


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_killed_run_is_taken_over_by_its_resume(capsys) -> None:
    process = child(*LONG, "hydra.run.dir=run")
    deadline = time.monotonic() + 120
    metrics = RUN / "metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.exists() and rows_of(RUN)):
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    assert RunFolder(RUN).status == "interrupted"
    (RUN / "checkpoints/.staging-left").mkdir()
    assert exits("resume=run", "frames=128") == 0
    assert f"taken over from process {process.pid} " in capsys.readouterr().err
    assert [row["frames"] for row in rows_of(RUN)] == [64, 128]
    assert not (RUN / OWNER_FILE).exists()
    assert not (RUN / "checkpoints/.staging-left").exists()
