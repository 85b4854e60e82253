"""Machines that this one is not: macOS, which has no /proc, Windows, Pythons that do not run."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from klrl.runs import owner
from klrl.runs.owner import process_start
from klrl.sweep import probe

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_without_proc_a_process_is_known_by_its_start(monkeypatch) -> None:
    on_linux = process_start(os.getpid())
    monkeypatch.setattr(owner, "_PROCESSES", Path("nowhere"))
    started = process_start(os.getpid())
    assert started != on_linux
    assert re.fullmatch(r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}", started)
    assert process_start(os.getpid()) == started
    this = {"pid": os.getpid(), "pid_started": started}
    assert owner.lives_here(this)
    assert not owner.lives_here(this | {"pid_started": "Thu Jan  1 00:00:00 1970"})

    child = subprocess.Popen(["sleep", "60"])
    assert process_start(child.pid) is not None
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None, "ended, not yet collected"
    child.wait()
    assert process_start(child.pid) is None


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes(monkeypatch, system: str, unit: int) -> None:
    usage = SimpleNamespace(ru_maxrss=3_000_000)
    monkeypatch.setattr(probe.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(probe.sys, "platform", system)
    assert probe._peak(probe.resource.RUSAGE_SELF) == 3_000_000 * unit


@pytest.mark.parametrize("words", [["-m", "klrl", "--version"], ["-m", "klrl.evaluate", "run"]])
def test_on_windows_one_line_names_wsl(words: list[str]) -> None:
    """As there: Python has no module fcntl."""
    Path("sitecustomize.py").write_text("import sys\nsys.modules['fcntl'] = None\n")
    env = os.environ | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "klrl: runs on Linux and macOS; on Windows, install it in WSL"
    ]


def test_hydras_help_is_still_no_text() -> None:
    """Else ``_Unchecked`` in klrl/config/compose.py, which Python 3.14 needs for it, may go."""
    from klrl.config.compose import hydras

    helps = [action.help for action in hydras.get_args_parser()._actions]
    assert any(not isinstance(each, str) for each in helps)
