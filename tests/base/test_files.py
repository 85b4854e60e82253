"""Files that appear whole or not at all."""

import errno
import os
import resource
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.base.files import (
    expanded,
    make_folder,
    replace_file,
    replacing,
    to_append,
    to_update,
)
from tests.conftest import name_of


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
        steps.append(name_of(descriptor))
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

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="No space left|File too large"):
            replace_file(path, "after")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_home_that_is_none_stays_as_it_stands(monkeypatch) -> None:
    """As in a shell; pathlib raises RuntimeError, which is no ``no such folder``."""
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x") == Path("/home/me/x")
    assert expanded("~nosuchuser/x") == Path("~nosuchuser/x")
    assert expanded(Path("./~")) == Path("/home/me")
    assert expanded("a/~") == Path("a/~")


@pytest.mark.parametrize("open_", [to_append, to_update])
def test_no_link_is_written_through(tmp_path: Path, open_) -> None:
    link, precious = tmp_path / "log.txt", tmp_path / "precious"
    link.symlink_to(precious)
    for text in (None, "text"):
        if text is not None:
            precious.write_text(text)
        with pytest.raises(ConfigError, match="log.txt: is a link"):
            open_(link)
        assert precious.exists() == (text is not None), "nor made by it"
    assert precious.read_text() == "text"


def test_a_link_in_place_of_the_partial_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    for name in ("sweep.tmp", "sweep.json"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "sweep.json", "{}")
    assert not (tmp_path / "sweep.json").is_symlink()
    assert (tmp_path / "sweep.json").read_text() == "{}"
    assert (tmp_path / "precious").read_text() == "text"


@pytest.mark.parametrize(("open_", "after"), [(to_append, "one\ntwo\n"), (to_update, "two\n")])
def test_a_file_with_another_name_is_copied_first(tmp_path: Path, open_, after: str) -> None:
    (tmp_path / "other").mkdir()
    other, path = tmp_path / "other" / "rows", tmp_path / "rows"
    other.write_text("one\n")
    path.hardlink_to(other)
    with open_(path) as file:
        file.write(b"two\n")
    assert (other.read_text(), path.read_text()) == ("one\n", after)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "rows"]


def test_a_file_with_one_name_is_opened_and_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    to_append(path).close()
    before = path.stat().st_ino
    for word in (b"one", b"two"):
        with to_append(path) as file:
            file.write(word)
    assert (path.stat().st_ino, path.read_bytes()) == (before, b"onetwo")


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows")
    with pytest.raises(ConfigError, match="rows: is not a regular file"):
        to_append(tmp_path / "rows")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "wandb").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="wandb: is a link"):
        make_folder(tmp_path / "wandb")
    assert make_folder(tmp_path / "videos").is_dir()
    assert make_folder(tmp_path / "videos").is_dir()
