"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from klrl.base.files import expanded, replace_file, replacing


def test_a_reader_sees_the_old_text_until_the_new_one_is_whole(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "manifest.json"
    replace_file(path, "before")
    seen = []
    rename = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (seen.append(to.read_text()), rename(self, to))[1]
    )
    replace_file(path, "naïve")
    assert (seen, path.read_bytes()) == (["before"], "naïve".encode())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_half_written_leaves_nothing(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "model"

    def write(text: str, error: type[BaseException] | None = None) -> None:
        with replacing(path) as partial:
            if folder:
                partial.mkdir()
            (partial / "weights" if folder else partial).write_text(text)
            assert not path.exists()
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write("half", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []
    write("whole")
    assert (path / "weights" if folder else path).read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["text", "file", "folder"])
def test_the_disk_confirms_the_contents_before_the_name_and_then_the_name(
    tmp_path: Path, monkeypatch, kind: str
) -> None:
    steps: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def replace(path: Path, to: Path) -> Path:
        steps.append("rename")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    if kind == "text":
        replace_file(tmp_path / "page.json", "x")
    else:
        with replacing(tmp_path / "page.tmp") as partial:
            if kind == "folder":
                partial.mkdir()
            (partial / "page.tmp" if kind == "folder" else partial).write_text("x")
    assert steps[-2:] == ["rename", tmp_path.name]
    assert steps[:-2] == ["page.tmp"] * (2 if kind == "folder" else 1)


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, monkeypatch, call: str) -> None:
    path = tmp_path / "manifest.json"
    replace_file(path, "before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        (tmp_path / "manifest.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_home_that_is_none_stays_as_it_stands(monkeypatch) -> None:
    """As in a shell; pathlib raises RuntimeError, which is no ``no such folder``."""
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x") == Path("/home/me/x")
    assert expanded("~nosuchuser/x") == Path("~nosuchuser/x")
    assert expanded(Path("./~")) == Path("/home/me")
    assert expanded("a/~") == Path("a/~")
