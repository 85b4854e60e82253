"""No program or module of the current folder is started, whatever PATH and libraries name."""

import os
from pathlib import Path

import pytest

from klrl.base.programs import protect
from klrl.runs.folder import _git_commit


@pytest.mark.parametrize("path", [".:{}", ":{}", "{}:", "bin:{}", "{}:./bin:."])
def test_a_program_of_the_current_folder_is_not_called_by_its_name(path: str, monkeypatch) -> None:
    Path("bin").mkdir()
    for folder in (Path(), Path("bin")):
        (folder / "git").write_text("#!/bin/sh\ntouch ran\n")
        (folder / "git").chmod(0o700)
    monkeypatch.setenv("PATH", path.format(before := os.environ["PATH"]))
    protect()
    _git_commit()
    assert not Path("ran").exists()
    assert os.environ["PATH"] == before


@pytest.mark.parametrize("session", ["x11", "wayland"])
def test_glfw_need_not_search_its_library(session: str, monkeypatch) -> None:
    pytest.importorskip("glfw")
    monkeypatch.delenv("PYGLFW_LIBRARY", raising=False)
    monkeypatch.setenv("XDG_SESSION_TYPE", session)
    protect()
    library = Path(os.environ["PYGLFW_LIBRARY"])
    assert library.is_absolute() == library.is_file() == (library.parent.name != "")
