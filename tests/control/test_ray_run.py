"""``collector=ray`` through the command line: a death, Ctrl-C, resume; and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from klrl.__main__ import main
from klrl.base.errors import ConfigError
from klrl.control.preflight import check_ray_address
from klrl.runs.machine import check_machine
from tests.conftest import QUICK

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

WORDS = ("env.num_envs=4", "learner.compile=false", "collector=ray", "collector.workers=2")
RAY_RUN = (*QUICK, *WORDS)


# -------------------------------------------------------------------------------- the whole run


def listening(pids: set[int]) -> set[str]:
    """Local addresses, in hexadecimal, on which processes listen for TCP."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(str(link.readlink()))
            except OSError:
                continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(words[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}


def processes_below(pid: int) -> dict[int, str]:
    """Every process that one has started, with its name; itself too."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
            names[int(folder.name)] = (folder / "cmdline").read_text().split("\0")[0]
        except OSError:
            continue
        parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: names[child] for child in found if child in names}


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "klrl", *words]
    with Path("told").open("w") as told:
        return subprocess.Popen(
            command, stdout=told, stderr=subprocess.STDOUT, start_new_session=True
        )


def rows() -> list[dict]:
    path = Path("run/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(true: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 120
    while not true():
        late = time.monotonic() > deadline or (process and process.poll() is not None)
        assert not late, Path("told").read_text()
        time.sleep(0.05)


def ended(process: subprocess.Popen, tree: dict[int, str]) -> int:
    """The exit code, once no process is left of those that there were."""
    code = process.wait(120)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tree))
    told = Path("told").read_text()
    assert not any(word in told for word in ("Traceback", "raylet", "ray.", "Error")), told
    return code


def _interrupt(process: subprocess.Popen) -> None:
    """A worker killed, then Ctrl-C."""
    wait_for(rows, process)
    tree = processes_below(process.pid)
    assert listening(set(tree)) <= LOOPBACK
    (victim, _) = sorted(pid for pid, name in tree.items() if "RolloutWorker" in name)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: "is lost" in Path("told").read_text())
    done = len(rows())
    wait_for(lambda: len(rows()) > done + 2)
    tree |= processes_below(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does for Ctrl-C
    assert ended(process, tree) == 130
    assert Path("told").read_text().count("is lost") == 1
    assert json.loads(Path("run/manifest.json").read_text())["status"] == "interrupted"


def test_a_run_survives_a_death_stops_when_told_and_goes_on() -> None:
    process = start(*RAY_RUN, "frames=1e7", "hydra.run.dir=run")
    try:
        _interrupt(process)
    finally:
        process.kill()
        process.wait()
    before = rows()
    with pytest.raises(SystemExit) as stop:
        main(["resume=run", f"frames={before[-1]['frames'] + 256}"])
    assert stop.value.code == 0
    assert [row["frames"] for row in rows()] == [128 * (i + 1) for i in range(len(before) + 2)]


# ------------------------------------------------------------------------------------ refusals


def test_a_missing_package_or_cluster_is_told_before_the_run(monkeypatch, settings) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers"):
        check_ray_address()
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        check_ray_address()
    monkeypatch.delenv("RAY_ADDRESS")
    check_ray_address()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="collector=ray: the package ray is not installed"):
        check_machine(settings("collector=ray", "collector.workers=1"))
