"""Writes klrl's files: replaces them in one step, appends to them, or changes them in place.

To replace a file, klrl writes and syncs a temporary file in the same folder, renames it, and syncs
the folder. After a power cut, the old file or the new one is there, complete.

A run folder may come from someone else, so its files may be links to files elsewhere. klrl does not
write through symbolic links. Before it changes a file with several hard links, it replaces this
name of the file by a copy.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from klrl.base.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """Expand a leading ``~`` or ``~user``; a path with an unknown user stays unchanged."""
    # Path.expanduser raises RuntimeError for an unknown user.
    return Path(os.path.expanduser(path))  # noqa: PTH111


#: Limits in bytes on files that are read whole: settings and manifests; rows and samples.
SMALL, ROWS = 1 << 24, 1 << 32


def read_plain(path: Path, most: int = SMALL) -> bytes:
    """Read a regular file; refuse others, since a pipe may block and a device may have no end.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than ``most`` bytes.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    if (size := path.stat().st_size) > most:
        raise OSError(f"it has {size:,} bytes, and klrl reads at most {most:,}")
    return path.read_bytes()


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, also through links; an OSError for a pipe or a device."""
    seen = set[str]()
    for top, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(top)) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        for each in (Path(top, name) for name in names):
            if each.exists() and not each.is_file():
                raise OSError(f"{each.name} is not a regular file")
            yield each


def replace_file(path: Path, text: str) -> None:
    """Replace the text of a file that only one process writes; readers see the old or the new text.

    Raises:
        ConfigError: a folder has the name of the file or of its temporary file.
        OSError: writing failed, for instance on a full disk; the old file is there, complete.
    """
    partial = path.with_suffix(".tmp")
    for each in (path, partial):
        if each.is_dir() and not each.is_symlink():
            raise ConfigError(f"{each}: is a folder, where klrl writes a file; move it away")
    try:
        partial.unlink(missing_ok=True)  # ``writing`` refuses an existing file
        with writing(partial) as file:
            file.write(text.encode(errors="backslashreplace"))  # a path may be invalid UTF-8
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file, or make a folder, that several processes may write at the same time.

    Yields:
        A path in a temporary folder. The caller makes the new file or folder there. At the end it
        is moved to ``path``; after an error it is removed.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        yield partial
        for each in (*partial.rglob("*"), partial):
            sync(each)
        partial.replace(path)
    sync(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it at the end; refuse an existing file."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def to_append(path: Path) -> BinaryIO:
    """Open or create a file for unbuffered appending; raise as :func:`open_in_place` does."""
    return os.fdopen(open_in_place(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)


def to_update(path: Path) -> BinaryIO:
    """Open or create a file for unbuffered changes; raise as :func:`open_in_place` does."""
    return os.fdopen(open_in_place(path, os.O_RDWR), "r+b", buffering=0)


def open_in_place(path: Path, flags: int) -> int:
    """Open a file without truncating it, or create it; return the file descriptor.

    Raises:
        ConfigError: the file is a link, or not a regular file.
        OSError: the file cannot be written.
    """
    refuse_link(path)
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is not a regular file; move it away")
        if status.st_nlink > 1:
            with replacing(path) as partial:
                shutil.copyfile(path, partial)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def make_folder(path: Path) -> Path:
    """Make a folder, but no parents, since a run may be moved; refuse a path that is a link."""
    refuse_link(path)
    path.mkdir(exist_ok=True)
    return path


def refuse_link(path: Path, name: str = "") -> None:
    """Refuse a path that is a link; the message starts with ``name``, by default the path."""
    if path.is_symlink():
        raise ConfigError(
            f"{name or f'{path}:'} is a link, whose target would be overwritten; replace it "
            "with a copy"
        )


def names(path: Path, file: os.stat_result) -> bool:
    """Return True if the path is still that of an open file."""
    try:
        return os.path.samestat(file, path.stat())
    except OSError:
        return False


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
