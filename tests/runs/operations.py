"""Counts the file operations that change a disk, and does something at the n-th."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Of ``os``, each with a path or a descriptor as its first argument.
_CALLS = (
    *("mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir"),
    *("fsync", "fdatasync", "truncate", "ftruncate", "write"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

Action = Callable[[str], None]
SetAttribute = Callable[[Any, str, Any], None]


class Operations:
    """Does something at one of this process's file operations, before it is carried out.

    A write to an opened file counts twice: before it, and when half of it is in the file. ``at`` is
    from 0, -1 for none.
    """

    def __init__(self, at: int, action: Action) -> None:
        self._at, self._action = at, action
        self.log: list[tuple[str, Path]] = []

    @property
    def done(self) -> int:
        """How many so far."""
        return len(self.log)

    def count(self, name: str, path: Path) -> None:
        """Count an operation that is about to be carried out."""
        self.log.append((name, path))
        if self.done - 1 == self._at:
            self._action(name)

    def install(self, set_attribute: SetAttribute = setattr) -> None:
        """Count from now on; ``set_attribute`` of a MonkeyPatch takes it back."""
        for name in _CALLS:
            set_attribute(os, name, self._counted(name, getattr(os, name)))
        set_attribute(os, "open", self._os_open(os.open))
        opened = self._io_open(io.open)
        set_attribute(io, "open", opened)
        set_attribute(builtins, "open", opened)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *args: Any, **options: Any) -> Any:
            self.count(name, _path(file, options.get("dir_fd")))
            return function(file, *args, **options)

        return call

    def _os_open(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(file: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & _WRITING:
                self.count("open", _path(file, options.get("dir_fd")))
            return function(file, flags, *args, **options)

        return call

    def _io_open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return function(file, mode, *args, **options)
            path = _path(file, None)
            self.count("open", path)
            return _CountedFile(function(file, mode, *args, **options), path, self)

        return call


class _CountedFile:
    """An opened file whose writes count."""

    def __init__(self, file: Any, path: Path, operations: Operations) -> None:
        self._file, self._path, self._operations = file, path, operations

    def write(self, content: Any) -> int:
        # Bytes, not numbers, of what a memoryview holds.
        whole = content if isinstance(content, str) else memoryview(content).cast("B")
        self._operations.count("write", self._path)
        half = len(whole) // 2
        self._file.write(whole[:half])
        # Only where something is done there: a flush after each half would be slow.
        if self._operations.done == self._operations._at:
            self._file.flush()
        self._operations.count("half a write", self._path)
        self._file.write(whole[half:])
        return len(whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Any:
        return iter(self._file)

    def __enter__(self) -> _CountedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def _path(file: Any, folder: int | None) -> Path:
    """The absolute path of a name or a descriptor."""
    if isinstance(file, int):
        return _of_descriptor(file)
    path = Path(os.fsdecode(file))
    return (Path.cwd() if folder is None else _of_descriptor(folder)) / path


def _of_descriptor(number: int) -> Path:
    try:
        return Path(f"/proc/self/fd/{number}").readlink()
    except OSError:
        return Path("/")
