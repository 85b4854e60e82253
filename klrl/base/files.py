"""Writes klrl's files: replaces them in one step, appends to them, or changes them in place.

To replace a file, klrl writes a temporary file in the same folder, syncs it, renames it, and syncs
the folder: a power cut leaves the old file or the new one.

A run folder may come from someone else. So klrl never writes through a symbolic link, and replaces
a file that has hard links by a copy before it writes into the file.
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


def read_plain(path: Path) -> bytes:
    """Read a regular file; refuse a pipe, which may block, and a device, which may have no end.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.read_bytes()


def replace_file(path: Path, text: str) -> None:
    """Replace a file that only one process writes; a reader never sees half of it.

    Raises:
        ConfigError: a folder has the name of the file or of its temporary file.
        OSError: as on a full disk; the old file is kept.
    """
    partial = path.with_suffix(".tmp")
    for each in (path, partial):
        if each.is_dir() and not each.is_symlink():
            raise ConfigError(f"{each}: is a folder, where klrl writes a file; move it away")
    try:
        partial.unlink(missing_ok=True)  # an old temporary file may be a link
        with writing(partial) as file:
            file.write(text.encode(errors="backslashreplace"))  # paths may not be UTF-8
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file, or make a folder, that several processes may be writing.

    Yields:
        A path in a temporary folder next to ``path``, to be written by the caller and renamed to
        ``path`` at the end. If writing fails, nothing is left. An existing folder is not replaced.
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
    """Open a new file for writing; refuse an existing one. Its contents are synced at the end."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def to_append(path: Path) -> BinaryIO:
    """Open a file to append, unbuffered; create a missing one. Errors as :func:`open_in_place`."""
    return os.fdopen(open_in_place(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)


def to_update(path: Path) -> BinaryIO:
    """Open a file for changes in place, unbuffered; create a missing one. Errors as above."""
    return os.fdopen(open_in_place(path, os.O_RDWR), "r+b", buffering=0)


def open_in_place(path: Path, flags: int) -> int:
    """Open a file without truncating it, and return the descriptor; create a missing file.

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
    """Make a folder and its parents; refuse a link."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def refuse_link(path: Path, name: str = "") -> None:
    """Refuse to write through a link; ``name`` is the link's name in the message."""
    if path.is_symlink():
        raise ConfigError(
            f"{name or f'{path}:'} is a link, whose target would be overwritten; replace it "
            "with a copy"
        )


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
