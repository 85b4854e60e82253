"""Every refusal in one line: the words in ``messages/*.yaml``, and what klrl says to them.

An entry is ``{words: a command line as a shell reads it, says: a part of the error, or several}``.
Beforehand are there: ``files: {path: text}``, ``run: true`` a finished run in ``run/``,
``page: true`` the files of docs/extending.md, ``env: {NAME: value, or null for none}``. Exit code
2, one line, nothing written.
"""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import klrl
from klrl.__main__ import main
from tests.conftest import QUICK
from tests.extending.page import files

ENTRIES = [
    pytest.param(entry, id=f"{path.stem}: {entry['words'][:70]}")
    for path in sorted(Path(__file__).with_name("messages").glob("*.yaml"))
    for entry in yaml.safe_load(path.read_text("utf-8"))
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a second on Pendulum."""
    return klrl.run(*QUICK, folder=tmp_path_factory.mktemp("finished") / "run").folder


def tree() -> dict[Path, int]:
    """Every path below the current folder, with the time of its last change.

    An empty ``outputs`` is nothing: a sweep makes it before it knows its own folder's name.
    """
    paths = set(Path().rglob("*")) - {Path("outputs")}
    return {path: path.lstat().st_mtime_ns for path in paths}


@pytest.mark.integration
@pytest.mark.parametrize("entry", ENTRIES)
def test_wrong_words_are_answered_in_one_line(
    entry: dict[str, Any], capsys, monkeypatch, request
) -> None:
    assert entry.keys() <= {"words", "says", "files", "run", "page", "env"}
    for name, value in entry.get("env", {}).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if entry.get("run"):
        shutil.copytree(request.getfixturevalue("finished"), "run")
    for path, text in {**(files() if entry.get("page") else {}), **entry.get("files", {})}.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's cache of the user's modules
    before = tree()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(entry["words"]))
    said = capsys.readouterr()
    assert (stop.value.code, said.out, len(said.err.splitlines())) == (2, "", 1), said
    says = entry["says"]
    for part in [says] if isinstance(says, str) else says:
        assert part in said.err
    assert tree() == before
