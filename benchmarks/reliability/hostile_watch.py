"""An audit hook: what a process does that no file handed to it may make it do."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: In the code of every planted file, so that its bytes are known wherever they are read.
TAG = "KLRL_PLANTED"
#: Modules of Python that a hostile file names, and klrl never imports.
_ODD_MODULES = re.compile(r"/(antigravity|this|evil\w*)\.py$")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: What klrl itself asks of other programs: the commit of the caller's tree.
_PROGRAMS = re.compile(
    r"^git (--no-optional-locks (rev-parse HEAD|status --porcelain)|config --(local|worktree) )"
)
_DEVICES = ("/dev/null", "/dev/tty", "/dev/shm", "/proc/self")
#: Event -> places of the paths among its arguments, and of their folders' descriptors.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "shutil.rmtree": ((0, 1),),
    "shutil.move": ((0, None), (1, None)),
    "shutil.copyfile": ((1, None),),
}
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.forkpty", "pty.spawn", "os.startfile")


class Watch:
    """The hook: a line in ``log`` for code of ``planted`` folders, and for writes elsewhere."""

    def __init__(
        self, log: int, planted: Iterable[Path], writable: Iterable[Path], *, starts: bool
    ) -> None:
        self._log, self._starts = log, starts
        self._planted = tuple(f"{path}/" for path in planted)
        self._writable = (*map(str, writable), *_DEVICES)
        self._inside = threading.local()
        self._handlers: dict[str, Callable[[tuple[Any, ...]], str | None]] = {
            "exec": lambda args: self._planted_path(getattr(args[0], "co_filename", None)),
            # ast.parse, which finds imports and runs nothing, compiles a file of no name.
            "compile": lambda args: self._planted_path(args[1]),
            "import": lambda args: self._planted_path(args[1]),
            "ctypes.dlopen": lambda args: self._planted_path(args[0]),
            "open": self._open,
            "marshal.loads": self._marshal,
            "subprocess.Popen": self._popen,
            "pickle.find_class": lambda args: self._started(f"{args[0]}.{args[1]}"),
            "socket.connect": self._connect,
            **dict.fromkeys(_STARTS, lambda args: self._started(str(args[0])[:100])),
        }

    def install(self) -> None:
        """From now on, to the end of the process."""
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        handler = self._handlers.get(event)
        places = _CHANGES.get(event) if handler is None else None
        if (handler is None and places is None) or getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            told = handler(args) if handler is not None else self._changes(places or (), args)
            if told is not None:
                os.write(self._log, f"{event}: {told}\n".encode("utf-8", "backslashreplace"))
        finally:
            self._inside.now = False

    # -------------------------------------------------------------------------- code, processes

    def _planted_path(self, path: Any) -> str | None:
        if not isinstance(path, str | bytes) or not path or os.fsdecode(path).startswith("<"):
            return None
        real = os.path.realpath(os.fsdecode(path))
        is_planted = real.startswith(self._planted) or _ODD_MODULES.search(real) is not None
        return os.fsdecode(path) if is_planted else None

    def _marshal(self, args: tuple[Any, ...]) -> str | None:
        content = args[0] if isinstance(args[0], bytes) else b""
        return "a planted .pyc" if TAG.encode() in content else None

    def _started(self, told: str) -> str | None:
        return None if self._starts else told

    def _popen(self, args: tuple[Any, ...]) -> str | None:
        given = args[1]
        words = given if isinstance(given, str) else " ".join(map(os.fsdecode, given))
        return None if _PROGRAMS.match(words) else self._started(words[:100])

    def _connect(self, args: tuple[Any, ...]) -> str | None:
        return None if isinstance(args[1], str | bytes) else self._started(str(args[1]))

    # -------------------------------------------------------------------------------------- files

    def _open(self, args: tuple[Any, ...]) -> str | None:
        path, _, flags = args
        if isinstance(path, int) or not isinstance(flags, int) or not flags & _WRITING:
            return None
        return self._outside(path, None)

    def _changes(
        self, places: tuple[tuple[int, int | None], ...], args: tuple[Any, ...]
    ) -> str | None:
        for place, folder in places:
            descriptor = args[folder] if folder is not None and folder < len(args) else None
            # A name is taken away, or given: what it leads to is not touched.
            told = self._outside(args[place], descriptor, follow=False)
            if told is not None:
                return told
        return None

    def _outside(self, path: Any, descriptor: Any, *, follow: bool = True) -> str | None:
        """The path, if it is outside of the folders that may be written."""
        if isinstance(path, int) or not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.fsdecode(path)
        if isinstance(descriptor, int) and descriptor >= 0 and not text.startswith("/"):
            text = f"{Path(f'/proc/self/fd/{descriptor}').readlink()}/{text}"
        if follow:
            real = os.path.realpath(text)
        else:
            head, tail = os.path.split(os.path.abspath(text))  # noqa: PTH100
            real = f"{os.path.realpath(head)}/{tail}"
        inside = any(real == each or real.startswith(f"{each}/") for each in self._writable)
        return None if inside else real
