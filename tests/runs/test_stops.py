"""How a run stops before its end: signals, NaN, failures, and what it leaves."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from klrl.base.errors import Interrupted, NonFiniteError
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import child, exits, manifest_of, only_run, rows_of, wandb_records

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("signum", "code", "logger"),
    [
        (signal.SIGINT, 130, "none"),
        (signal.SIGTERM, 143, "wandb"),
        pytest.param(signal.SIGINT, 130, "wandb", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "none", marks=pytest.mark.slow),
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


def test_a_run_that_diverges_stops_with_the_place_and_keeps_its_checkpoint(settings) -> None:
    from klrl.runs.folder import RunFolder

    experiment = Training(settings("frames=1024", "checkpoint.every=1"))
    charge = experiment.parts.charge_kl

    def poisoned(batch):
        if experiment.counters.iteration == 3:
            batch["next", "reward"][0, 0] = float("inf")
        return charge(batch)

    experiment.parts.charge_kl = poisoned
    with pytest.raises(NonFiniteError):
        experiment.train(RunFolder(Path("run")))
    assert manifest_of(Path("run"))["status"] == "failed"
    assert len(rows_of(Path("run"))) == 3
    good = Training(settings("frames=1024"))
    good.checkpoints(RunFolder(Path("run"))).load_last(torch.device("cpu"))
    assert good.counters.iteration == 3
    assert all(p.isfinite().all() for p in good.parts.agent.modules.parameters())


def test_interrupted_is_no_exception() -> None:
    assert not issubclass(Interrupted, Exception)
    assert (Interrupted(2).exit_code, Interrupted(15).exit_code) == (130, 143)


def test_a_failing_job_lets_the_sweeps_others_run(capfd) -> None:
    code = exits("-m", *QUICK, "optim.lr=1e30,1e-3", "loss.normalize_advantage=false")
    assert code == 1
    told = capfd.readouterr()
    assert "NonFiniteError" in told.err
    jobs = {p.name: manifest_of(p) for p in only_run().iterdir() if p.is_dir()}
    assert jobs["optim.lr=1e+30"]["status"] == "failed"
    assert "optim.lr" in jobs["optim.lr=1e+30"]["error"]
    assert jobs["optim.lr=0.001"]["status"] == "finished"
    assert "2 jobs: 1 failed, 1 finished" in told.out


def test_a_failing_run_says_so_in_a_line_and_exits_with_1(capfd) -> None:
    assert exits(*QUICK, "optim.lr=1e30", "loss.normalize_advantage=false") == 1
    told = capfd.readouterr()
    assert told.err.startswith("klrl: failed: ")
    assert "Traceback" not in told.err
    assert manifest_of(only_run())["status"] == "failed"
    assert list(only_run().glob("checkpoints/last/*/manifest.json")), "there is one from the start"


def test_sigterm_during_start_up_leaves_nothing() -> None:
    process = child(*QUICK)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any(Path("outputs").glob("*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode in (143, 0), told
    if process.returncode == 143:
        assert "Traceback" not in told
        assert not any(Path("outputs").glob("*")) or "interrupted" in told


def test_a_second_signal_stops_at_once() -> None:
    from klrl.base.interrupt import StopRequest

    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stop.obey()
    assert signal.getsignal(signal.SIGINT) == before
