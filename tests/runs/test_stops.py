"""How a run stops before its end: signals, NaN, failures, and what it leaves."""

import errno
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from klrl.base.errors import Interrupted
from klrl.base.interrupt import StopRequest
from klrl.cli.wrapper import exit_code
from klrl.runs.folder import RunFolder
from klrl.sweep.run import passed_on
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import child, exits, manifest_of, only_run, rows_of, wandb_records

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("signum", "code", "logger"),
    [
        pytest.param(signal.SIGINT, 130, "none", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "wandb", marks=pytest.mark.services),
        pytest.param(signal.SIGHUP, 129, "none", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, "none", marks=pytest.mark.slow),
        pytest.param(signal.SIGXCPU, 152, "none", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "wandb", marks=pytest.mark.slow),
        (signal.SIGTERM, 143, "none"),
    ],
)
def test_a_signal_ends_the_run_in_good_order_and_it_can_go_on(
    signum: int, code: int, logger: str
) -> None:
    words = [w for w in QUICK if not w.startswith("frames")]
    words += [f"logger={logger}", "learner.compile=false"]
    process = child(*words, "frames=10_000_000", "hydra.run.dir=run", "checkpoint.every=100000")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        Path("run/metrics.jsonl").exists() and rows_of(Path("run"))
    ):
        time.sleep(0.1)
    process.send_signal(signum)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert "Traceback" not in told
    assert manifest_of(Path("run"))["status"] == "interrupted"
    done = rows_of(Path("run"))[-1]["frames"]
    if logger == "wandb":
        assert wandb_records(Path("run"))["exit"][0]["exit_code"] == code
        return
    assert exits("resume=run", f"frames={int(done) + 64}") == 0
    assert rows_of(Path("run"))[-1]["frames"] == done + 64


def test_a_failing_run_says_so_in_a_line_and_exits_with_1(capfd) -> None:
    assert exits(*QUICK, "optim.lr=1e30", "loss.normalize_advantage=false") == 1
    told = capfd.readouterr()
    assert told.err.startswith("klrl: failed: ")
    assert "Traceback" not in told.err
    assert manifest_of(only_run())["status"] == "failed"
    assert list(only_run().glob("checkpoints/last/*/manifest.json")), "there is one from the start"


def test_a_signal_that_arrives_while_the_processes_agree_is_not_lost(monkeypatch) -> None:
    def agreed(signum: int | None) -> int | None:
        signal.raise_signal(signal.SIGTERM)
        return signum

    with StopRequest() as stop:
        monkeypatch.setattr("klrl.base.ranks.agreed", agreed)
        assert not stop.agreed(), "other processes may not know of it yet"
        monkeypatch.undo()
        assert stop.agreed()
        assert stop.signum == signal.SIGTERM


def test_a_signal_inside_a_write_of_the_terminal_is_told_and_raises_nothing(
    monkeypatch, capfd
) -> None:
    """Python handles a signal after a raw write, when the buffer's owner may not write again."""

    class Terminal(io.RawIOBase):
        written, stopped = b"", False

        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            if not self.stopped:
                self.stopped = True
                signal.raise_signal(signal.SIGTERM)
            self.written += bytes(data)
            return len(data)

    terminal = Terminal()
    with StopRequest() as stop:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(terminal)))
        print("a row", file=sys.stderr, flush=True)
        assert stop.agreed()
    assert terminal.written == b"a row\n"
    monkeypatch.undo()
    assert "stopping after this iteration" in capfd.readouterr().err


def test_a_second_signal_stops_at_once(capsys) -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stop.obey()
    assert signal.getsignal(signal.SIGINT) == before
    told = capsys.readouterr().err.splitlines()
    assert told[2:] == ["", "stopped at once; the last checkpoint is kept"]


NOTICES = (signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("signum", NOTICES)
def test_a_notice_stops_in_good_order_however_often_it_comes(signum: int, capsys) -> None:
    """A closed terminal sends SIGHUP twice, a CPU limit SIGXCPU every second."""
    with StopRequest() as stop:
        for _ in range(3):
            signal.raise_signal(signum)
        assert stop.signum == signum
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signum) == signal.SIG_DFL
    assert capsys.readouterr().err.count("stopping") == 1


def test_the_word_of_a_stop_begins_a_line_of_its_own(capsys, tmp_path) -> None:
    """A terminal shows ^C behind the line of the progress."""
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
    run = capsys.readouterr().err
    with passed_on(tmp_path, []):
        signal.raise_signal(signal.SIGINT)
    for err in (run, capsys.readouterr().err):
        blank, line = err.splitlines()
        assert (blank, line.split()[0]) == ("", "stopping")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_what_nohup_ignores_or_a_launcher_handles_is_left_alone(handler) -> None:
    before = [signal.signal(signum, handler) for signum in NOTICES]
    try:
        with StopRequest() as stop:
            for signum in NOTICES:
                signal.raise_signal(signum)
            assert stop.signum is None
    finally:
        for signum, handled in zip(NOTICES, before, strict=True):
            signal.signal(signum, handled)


@pytest.mark.parametrize("signum", NOTICES)
def test_a_notice_before_the_run_ends_the_command_with_its_code(signum: int) -> None:
    assert exit_code("klrl", lambda _: signal.raise_signal(signum), []) == 128 + signum


def test_a_terminal_that_is_gone_does_not_stop_the_stopping(monkeypatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("sys.stderr", Gone())
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.signum == signal.SIGHUP


def signal_in(monkeypatch, target: str) -> None:
    """SIGTERM as a function of klrl is called."""
    import klrl.runs.record
    from klrl.train.schedule import Evaluations

    owner = {"during": Evaluations, "_draw": klrl.runs.record, "summary": klrl.runs.record}[target]
    function = getattr(owner, target)

    def signalled(*args, **options):
        last = getattr(getattr(args[0], "_counters", None), "iteration", 2) == 2
        if last:
            signal.raise_signal(signal.SIGTERM)
        return function(*args, **options)

    monkeypatch.setattr(owner, target, signalled)


@pytest.mark.parametrize("target", ["during", "summary", "_draw"])
def test_sigterm_after_the_last_iteration_leaves_a_finished_run(target, monkeypatch) -> None:
    signal_in(monkeypatch, target)
    assert exits(*QUICK, "hydra.run.dir=run", "eval.every=2", "eval.episodes=1") == 0
    manifest = manifest_of(Path("run"))
    assert (manifest["status"], manifest["frames"], manifest["error"]) == ("finished", 128, None)
    assert [row["frames"] for row in rows_of(Path("run"))] == [64, 128]
    assert "eval/return" in rows_of(Path("run"))[-1]


def test_a_second_sigterm_while_a_finished_run_closes_leaves_it_finished(monkeypatch) -> None:
    signal_in(monkeypatch, "during")
    signal_in(monkeypatch, "summary")
    assert exits(*QUICK, "hydra.run.dir=run", "eval.every=2", "eval.episodes=1") == 143
    assert manifest_of(Path("run"))["status"] == "finished"


def test_a_sweep_stops_after_a_job_that_was_finished_when_the_signal_came(monkeypatch) -> None:
    signal_in(monkeypatch, "during")
    assert exits("-m", *QUICK, "seed=0,1", "eval.every=2", "eval.episodes=1", "sweep=s") == 143
    jobs = {p.parent.name: manifest_of(p.parent) for p in Path("outputs/s").glob("*/manifest.json")}
    assert {name: told["status"] for name, told in jobs.items()} == {"seed=0": "finished"}


def test_a_signal_after_the_save_waits_for_the_next_one(monkeypatch, settings) -> None:
    """Between a save that was not due and the look at the signal: no checkpoint, no stop."""
    training = Training(settings("frames=320", "checkpoint.every=100"))
    save = training.save

    def then_signalled(checkpoints, improved, stopping):
        save(checkpoints, improved, stopping)
        if training.counters.iteration == 2:
            training.stop()

    monkeypatch.setattr(training, "save", then_signalled)
    with pytest.raises(Interrupted):
        training.train(RunFolder(Path("run")))
    newest = max(Path("run/checkpoints/last").iterdir())
    assert newest.name == f"frames-{training.counters.frames:012d}"
    assert [row["frames"] for row in rows_of(Path("run"))] == [64, 128, 192]


@pytest.mark.parametrize("folder", [".", "deleted"])
def test_a_second_sigterm_stops_a_sweep_at_once_whatever_came_between(folder, capsys) -> None:
    with passed_on(Path(folder), []) as received:
        for signum in (signal.SIGTERM, signal.SIGXCPU):
            os.kill(os.getpid(), signum)
        assert received == [signal.SIGTERM, signal.SIGXCPU]
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capsys.readouterr().err.endswith("\nstopped at once; the last checkpoint is kept\n")
