"""Atomic writes: a file is written under another name in the same folder, then renamed. And ``~``.

What is renamed is on the disk before (fsync), and its new name after: a power cut leaves the old
file or the new one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def expanded(path: str | Path) -> Path:
    """A path with a leading ``~`` or ``~user`` as that home folder.

    It stays as it stands where there is no such user, as in a shell: there is no such folder then.
    """
    # Path.expanduser raises RuntimeError for an unknown user.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def replace_file(path: Path, text: str) -> None:
    """Replace a file that only one process writes; a reader never sees half of it.

    Raises:
        OSError: as on a full disk; the old file is kept.
    """
    partial = path.with_suffix(".tmp")
    try:
        with writing(partial) as file:
            file.write(text.encode())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file, or make a folder, that several processes may be writing.

    Yields:
        The path to write to, in a temporary folder beside ``path``; on leaving it is renamed to
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
def writing(path: Path, mode: str = "wb") -> Iterator[BinaryIO]:
    """Open a file to write; on leaving, the disk has confirmed its contents."""
    with path.open(mode) as file:
        yield file  # type: ignore[misc]
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have the disk confirm the contents of a file, or which files a folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
