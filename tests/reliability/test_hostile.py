"""``benchmarks/reliability/hostile.py``, small: the most telling commands of each folder."""

import json
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.reliability.ended import Ended, in_fork
from benchmarks.reliability.hostile_cases import cases
from benchmarks.reliability.hostile_edits import bomb
from benchmarks.reliability.hostile_watch import Watch

ROOT = Path(__file__).parents[2]
QUICK = [case.name for case in cases() if case.quick and not case.slow]

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> dict[str, list[str]]:
    """Case -> what was wrong; in a process that never computed in threads, so that it may fork."""
    table = tmp_path_factory.mktemp("hostile") / "table.json"
    command = [sys.executable, "-m", "benchmarks.reliability.hostile", "--quick", "--json"]
    ran = subprocess.run([*command, str(table)], cwd=ROOT, capture_output=True, text=True)
    assert table.exists(), ran.stdout + ran.stderr
    found: dict[str, list[str]] = defaultdict(list)
    for each in json.loads(table.read_text()):
        found[each["case"]] += [f"{each['command']}: {wrong}" for wrong in each["wrong"]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_a_hostile_folder_does_nothing(wrong, case) -> None:
    assert wrong[case] == []


def watched(tmp_path: Path, act, **how: bool) -> str:
    """What the hook says of an act, in a fork."""
    log, mine = tmp_path / "log", tmp_path / "mine"
    for folder in (mine, tmp_path / "planted", tmp_path / "victim"):
        folder.mkdir()
    (tmp_path / "planted" / "evil.py").write_text("x = 1\n")
    (tmp_path / "victim" / "file.txt").write_text("x\n")

    def go() -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        given = {"starts": False, **how}
        Watch(descriptor, [tmp_path / "planted"], [mine], **given).install()
        act()

    ended = in_fork(go, tmp_path)
    assert isinstance(ended, Ended)
    return log.read_text()


def _import() -> None:
    sys.path.append("planted")
    __import__("evil")


def _write_through() -> None:
    Path("mine/link").symlink_to("../victim/file.txt")
    Path("mine/link").write_text("mine\n")


#: Name -> an act, and the event by which it is known; None: it is allowed.
ACTS = {
    "import": (_import, "exec"),
    "exec": (lambda: exec(compile("x = 1", "planted/evil.py", "exec")), "exec"),
    "a shell": (lambda: os.system("true"), "os.system"),
    "a process": (lambda: subprocess.run(["true"], check=True), "subprocess.Popen"),
    "git": (
        lambda: subprocess.run(
            ["git", "--no-optional-locks", "rev-parse", "HEAD"], capture_output=True
        ),
        None,
    ),
    "a pickle": (lambda: pickle.loads(bomb()), "pickle.find_class"),
    "a write": (lambda: Path("victim/new").write_text("x"), "open"),
    "a write through a link": (_write_through, "open"),
    "a rename": (lambda: Path("victim/file.txt").rename("mine/file.txt"), "os.rename"),
    "a removal": (lambda: Path("victim/file.txt").unlink(), "os.remove"),
    "a hard link": (lambda: os.link("victim/file.txt", "victim/again"), "os.link"),
    "a cut": (lambda: os.truncate("victim/file.txt", 0), "os.truncate"),
    "a write of one's own": (lambda: Path("mine/new").write_text("x"), None),
    "a look": (lambda: Path("victim/file.txt").read_text(), None),
}


@pytest.mark.parametrize("act", ACTS)
def test_the_hook_sees(tmp_path, monkeypatch, act) -> None:
    monkeypatch.chdir(tmp_path)
    do, event = ACTS[act]
    told = watched(tmp_path, do)
    assert f"{event}: " in told if event else told == ""
