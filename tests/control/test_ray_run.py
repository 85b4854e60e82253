"""``collector=ray`` through the command line: a death, Ctrl-C, resume; and what is refused."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from klrl.__main__ import main
from klrl.base.errors import ConfigError
from klrl.base.ray_start import check_address
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_machine
from tests.conftest import QUICK
from tests.runs.commands import CHILDREN
from tests.sweep.commands import frames_of

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


#: What Ray says of itself; a page of it begins with one of these words.
RAYS_WORDS = re.compile(r"raylet|ray\.|ray::|\(pid=|node_id|Node ID|Traceback|WARNING|core_worker")


class Command:
    """klrl as a user starts it, its output and its errors in two files."""

    def __init__(self, *words: str, **environment: str) -> None:
        self._files = [Path(f"told-{time.monotonic_ns()}-{name}") for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "klrl", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        CHILDREN.append(self.process)

    @property
    def out(self) -> str:
        return self._files[0].read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._files[1].read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            late = time.monotonic() > deadline or self.process.poll() is not None
            assert not late, self.out + self.err
            time.sleep(0.05)

    def ends(self, code: int) -> str:
        """What it said, once it has ended; nothing of it is Ray's."""
        assert self.process.wait(200) == code, self.out + self.err
        print(self.out, self.err, sep="")
        assert not RAYS_WORDS.search(self.out + self.err)
        return self.out

    def processes(self) -> set[psutil.Process]:
        """It and every process that it has started."""
        process = psutil.Process(self.process.pid)
        return {process, *process.children(recursive=True)}


RUN = Path("run")


def _interrupt(command: Command) -> None:
    """A worker killed, then Ctrl-C; no process is left."""
    command.wait_for(lambda: frames_of(RUN))
    tree = command.processes()
    assert listening({each.pid for each in tree}) <= LOOPBACK
    victim, _ = (each for each in tree if "RolloutWorker" in each.name())
    victim.kill()
    command.wait_for(lambda: "is lost" in command.out)
    done = len(frames_of(RUN))
    command.wait_for(lambda: len(frames_of(RUN)) > done + 2)
    tree |= command.processes()
    os.killpg(command.process.pid, signal.SIGINT)  # as the terminal does for Ctrl-C
    assert command.ends(130).count("is lost") == 1
    assert not psutil.wait_procs(tree, 120)[1]
    assert RunFolder(RUN).status == "interrupted"


def test_a_run_survives_a_death_stops_when_told_and_goes_on() -> None:
    _interrupt(Command(*RAY_RUN, "frames=1e7", "hydra.run.dir=run"))
    before = frames_of(RUN)
    with pytest.raises(SystemExit) as stop:
        main(["resume=run", f"frames={before[-1] + 256}"])
    assert stop.value.code == 0
    assert frames_of(RUN) == [128 * (i + 1) for i in range(len(before) + 2)]


# ------------------------------------------------------------------------------------ refusals


def test_a_missing_package_or_cluster_is_told_before_the_run(monkeypatch, settings) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers"):
        check_address(os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        check_address(os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")
    monkeypatch.delenv("RAY_ADDRESS")
    check_address(os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="collector=ray: the package ray is not installed"):
        check_machine(settings("collector=ray", "collector.workers=1"))
