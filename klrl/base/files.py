"""The one module that writes klrl's files: replaced in one step, appended to, changed in place.

What is replaced is written under another name in the same folder, then renamed. It is on the disk
before (fsync), and its new name after: a power cut leaves the old file or the new one.

A folder of runs may come from elsewhere: no link in it is written through, and a file that has
another name (a hard link) is replaced by a copy before it is written into.
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
    """A path with a leading ``~`` or ``~user`` as that home; unchanged without such a user."""
    # Path.expanduser raises RuntimeError for an unknown user.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def read_plain(path: Path) -> bytes:
    """The contents of a file; a pipe would be waited for, and a device has no end.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no plain file")
    return path.read_bytes()


def replace_file(path: Path, text: str) -> None:
    """Replace a file that only one process writes; a reader never sees half of it.

    Raises:
        ConfigError: a folder is in its way.
        OSError: as on a full disk; the old file is kept.
    """
    partial = path.with_suffix(".tmp")
    for each in (path, partial):
        if each.is_dir() and not each.is_symlink():
            raise ConfigError(f"{each}: is a folder, where klrl writes a file; move it away")
    try:
        partial.unlink(missing_ok=True)  # it may be a link
        with writing(partial) as file:
            file.write(text.encode(errors="backslashreplace"))  # a path may be no UTF-8
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file, or make a folder, that several processes may be writing.

    Yields:
        The path to write to, in a temporary folder next to ``path``; on leaving it is renamed to
        ``path``. If writing fails, nothing is left. An existing folder is not replaced.
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
    """Write a file that is not there yet; on leaving, the disk has confirmed its contents."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def to_append(path: Path) -> BinaryIO:
    """Open a file to append to, unbuffered; made if it is missing; errors as :func:`in_place`."""
    return os.fdopen(in_place(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)


def to_update(path: Path) -> BinaryIO:
    """Open a file to change in place, unbuffered; as :func:`to_append`."""
    return os.fdopen(in_place(path, os.O_RDWR), "r+b", buffering=0)


def in_place(path: Path, flags: int) -> int:
    """The descriptor of a file that keeps what it holds; made if it is missing.

    Raises:
        ConfigError: it is a link, or no plain file.
        OSError: it cannot be written.
    """
    refuse_link(path)
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is no plain file; move it away")
        if status.st_nlink > 1:
            with replacing(path) as partial:
                shutil.copyfile(path, partial)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def make_folder(path: Path) -> Path:
    """Make a folder that klrl names, below one that the user named; refuse a link."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def refuse_link(path: Path, told: str = "") -> None:
    """Refuse to write through a link; ``told``: what the message calls it."""
    if path.is_symlink():
        raise ConfigError(
            f"{told or f'{path}:'} is a link, and what it leads to would be overwritten; put a "
            "copy in its place"
        )


def sync(path: Path) -> None:
    """Have the disk confirm the contents of a file, or which files a folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
