"""What serves a run and fails: wandb, pictures, progress, stdout. Training goes on to its end."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from klrl.domains import CONTROL
from klrl.runs.folder import RunFolder
from klrl.runs.guard import Guard
from klrl.runs.progress import Progress
from klrl.train.loop import start
from tests.conftest import QUICK
from tests.report.toys import write_run
from tests.runs.commands import exits, manifest_of, only_run, rows_of, wandb_records

pytestmark = pytest.mark.timeout(300)

WANDB = [word for word in QUICK if word != "logger=none"] + ["logger=wandb"]


@pytest.fixture(autouse=True)
def _own_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a test starts has a wandb of its own, not that of an earlier test."""
    monkeypatch.delenv("WANDB_SERVICE", raising=False)


def python(*words: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **more)


def shell(line: str) -> subprocess.CompletedProcess:
    """Run a line in bash, with ``klrl`` for this tree's; its exit code is klrl's."""
    klrl = f"{sys.executable} -m klrl"
    line = "set -o pipefail; " + line.replace("klrl", klrl, 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


def side_failures(folder: Path) -> list[str]:
    manifest = manifest_of(folder)
    assert manifest["status"] == "finished"
    assert manifest["error"] is None
    assert rows_of(folder)[-1]["frames"] == 128
    failures = manifest.get("side_failures", [])
    # The curves are drawn when the run has ended, so their failure may be noted after that.
    now = datetime.now(UTC).isoformat(timespec="seconds")
    assert all(manifest["started"] <= each["when"] <= now for each in failures)
    return [f"{each['part']}: {each['error']}" for each in failures]


@pytest.mark.integration
def test_a_run_trains_on_when_the_reader_of_stdout_leaves() -> None:
    done = shell(f"klrl {' '.join(QUICK)} hydra.run.dir=run | head -1")
    assert done.stderr == "klrl: stdout: [Errno 32] Broken pipe; the run goes on\n"
    assert done.returncode == 0
    assert done.stdout.startswith("preflight: ")
    assert side_failures(Path("run")) == ["stdout: BrokenPipeError: [Errno 32] Broken pipe"]


@pytest.mark.slow
def test_a_sweep_goes_on_too_and_says_so_once() -> None:
    done = shell(f"klrl -m {' '.join(QUICK)} seed=0,1 hydra.sweep.dir=sweep | head -1")
    assert done.stderr == "klrl: stdout: [Errno 32] Broken pipe; the run goes on\n"
    assert done.returncode == 0
    for seed in (0, 1):
        assert len(side_failures(Path(f"sweep/seed={seed}"))) == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("redirected", "failures"),
    [
        pytest.param(">&-", 0, marks=pytest.mark.slow),
        pytest.param("2>&-", 0, marks=pytest.mark.slow),
        (">&- 2>&- <&-", 0),
        pytest.param(">/dev/full", 1, marks=pytest.mark.slow),
        pytest.param(">/dev/full 2>/dev/full", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_needs_neither_stdout_nor_stderr(redirected: str, failures: int) -> None:
    done = shell(f"klrl {' '.join(QUICK)} hydra.run.dir=run {redirected}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    noted = side_failures(Path("run"))
    assert len(noted) == failures
    assert all("No space left on device" in each for each in noted)


@pytest.mark.integration
def test_a_refusal_is_a_refusal_where_stderr_is_closed_too() -> None:
    assert shell("klrl kl=nonsense 2>&-").returncode == 2
    assert shell("klrl kl=nonsense 2>/dev/full").returncode == 2


@pytest.mark.integration
@pytest.mark.parametrize("words", ["--version", "--help", "ls"])
def test_what_cannot_be_printed_is_one_line(words: str) -> None:
    write_run(Path("outputs/0"))
    done = shell(f"klrl {words} > /dev/full")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(": failed: [Errno 28] No space left on device")


def test_progress_that_cannot_be_printed_is_told_once_and_noted(settings, monkeypatch, capsys):

    class Closed:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        start(settings(), RunFolder(Path("run")))
    line = "progress: BrokenPipeError: [Errno 32] Broken pipe"
    assert side_failures(Path("run")) == [line]
    assert capsys.readouterr().err == f"klrl: {line}; training goes on\n"


def test_a_ticker_that_cannot_print_ends_no_thread() -> None:
    class Full:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    noted: list[str] = []
    with Progress(10, CONTROL, stream=Full(), every=0.01, guard=Guard(lambda *n: noted.extend(n))):
        pass
    assert noted == ["progress", "OSError: [Errno 28] No space left on device"]


@pytest.mark.integration
def test_a_run_whose_picture_cannot_be_drawn_has_finished(monkeypatch, capsys, curves) -> None:
    from matplotlib.figure import Figure

    def fail(self, path, **_):
        Path(path).write_bytes(b"half a picture")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    assert exits(*QUICK) == 0
    line = "curves.png: OSError: [Errno 28] No space left on device"
    assert side_failures(only_run()) == [line]
    assert capsys.readouterr().err == f"klrl: {line}; training goes on\n"
    assert not list(only_run().glob("*curves*")), "half a picture stayed"


KILLS = """
import os, signal, subprocess, sys, klrl
class Kill(klrl.Callback):
    def iterated(self, training, row, batch):
        if row["iteration"] == 1:
            children = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"],
                                      capture_output=True, text=True, check=True)
            for pid in children.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
klrl.run(*sys.argv[1:], folder="run", callbacks=[Kill()])
klrl.run(*sys.argv[1:], folder="next")
"""
UNREACHABLE = """
import sys
from klrl.__main__ import main
from klrl.runs import wandb_logger
wandb_logger._INIT_SECONDS = 3.0
main(sys.argv[1:])
"""


@pytest.mark.services
def test_a_run_outlives_wandbs_process(tmp_path) -> None:
    done = python("-c", KILLS, *WANDB)
    assert done.returncode == 0, done.stderr
    (line,) = side_failures(Path("run"))
    assert line in (  # as the socket notices it
        "wandb: ConnectionResetError: Connection lost",
        "wandb: ConnectionResetError: [Errno 104] Connection reset by peer",
    )
    assert done.stderr == f"klrl: {line}; training goes on\n"
    assert side_failures(Path("next")) == []
    assert wandb_records(Path("next"))["exit"][0]["exit_code"] == 0


@pytest.mark.services
def test_where_wandbs_server_does_not_answer_the_run_is_logged_offline() -> None:
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    words = (*WANDB, "logger.mode=online", "hydra.run.dir=run")
    done = python("-c", UNREACHABLE, *words, env={**os.environ, **server}, timeout=100)
    assert done.returncode == 0, done.stderr
    (failure,) = side_failures(Path("run"))
    assert failure.startswith("wandb's server: CommError: ")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("klrl")]
    assert line.endswith("logs offline; wandb sync uploads it later")
    assert "Traceback" not in done.stderr
    assert len(wandb_records(Path("run"))["history"]) == 2


def test_a_part_that_failed_is_not_called_again_and_a_stop_is_no_failure(capsys) -> None:
    noted: list[tuple[str, str]] = []
    calls: list[int] = []

    def fail(i: int) -> None:
        calls.append(i)
        raise ValueError(f"no {i}")

    def stop() -> None:
        raise KeyboardInterrupt

    guard = Guard(lambda *failure: noted.append(failure))
    assert guard.call("a", fail, 1) is None
    assert guard.call("a", fail, 2) is None
    assert guard.call("b", lambda: 3) == 3
    with pytest.raises(KeyboardInterrupt):
        guard.call("b", stop)
    assert calls == [1]
    assert noted == [("a", "ValueError: no 1")]
    assert capsys.readouterr().err == "klrl: a: ValueError: no 1; training goes on\n"
