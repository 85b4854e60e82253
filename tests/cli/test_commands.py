"""``klrl evaluate|report|...``: found by name, with the same exit codes and one-line errors."""

import importlib
import os
import signal
import subprocess
import sys

import hydra
import pytest
import torch
import torchrl

import klrl
from klrl.base.errors import ConfigError, Interrupted, NonFiniteError
from klrl.cli.main import COMMANDS
from tests.runs.commands import exits

ENDS = {
    "done": (lambda: 0, 0, ""),
    "refused": (lambda: throw(ConfigError("kl.coef=x: no")), 2, "{name}: kl.coef=x: no\n"),
    "failed": (lambda: throw(NonFiniteError("loss: NaN")), 1, "{name}: failed: loss: NaN\n"),
    "full disk": (
        lambda: throw(OSError(28, "No space left on device")),
        1,
        "{name}: failed: [Errno 28] No space left on device\n",
    ),
    "a pipe of its own": (
        lambda: throw(BrokenPipeError(32, "Broken pipe")),
        1,
        "{name}: failed: [Errno 32] Broken pipe\n",
    ),
    "told to stop": (lambda: throw(Interrupted(signal.SIGTERM)), 143, ""),
    "Ctrl-C": (lambda: throw(KeyboardInterrupt()), 130, "\n{name}: stopped\n"),
    "SIGTERM": (lambda: signal.raise_signal(signal.SIGTERM), 143, ""),
}


def throw(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_in_the_same_way(monkeypatch, capsys, command: str, case: str) -> None:
    act, code, told = ENDS[case]
    module = importlib.import_module(f"klrl.cli.{command}")
    monkeypatch.setattr(module, f"{command}_command", lambda words: act())
    before = signal.getsignal(signal.SIGTERM)
    assert exits(command) == code
    name = "klrl" if command == "run" else f"klrl {command}"
    assert capsys.readouterr().err == told.format(name=name)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_and_stands_in_that_of_klrl(capsys, command: str) -> None:
    assert exits("help" if command == "run" else "--help") == 0
    assert f"klrl {'env=' if command == 'run' else command}" in capsys.readouterr().out
    assert exits(command, "--help") == 0
    said = capsys.readouterr().out
    assert "klrl" in said
    assert ("512 responses" in said) is (command in ("evaluate", "kl"))


def test_tracebacks_on_demand_for_every_command(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert exits("evaluate", "nope") == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.splitlines()[-1].startswith("klrl evaluate: RUN=nope: no such folder")


def test_versions_are_those_of_the_packages(capsys) -> None:
    assert exits("--version") == 0
    told = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    # pip's torch is 2.13.0 to pip and calls itself 2.13.0+cu130.
    assert {name: each.partition("+")[0] for name, each in told.items()} == {
        "klrl": klrl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "torchrl": torchrl.__version__,
        "hydra": hydra.__version__,
    }


@pytest.mark.integration
def test_nothing_is_said_when_the_reader_leaves() -> None:
    """As in ``klrl --help | head -1``: no traceback, and no complaint from Python's own exit."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "klrl", "--help"], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(reading)
    os.close(writing)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (1, b"")
