"""stdout and stderr that outlive their reader: ``klrl ... | head -1`` trains on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream that drops what it cannot write, and says so once on stderr.

    After its first error its descriptor leads to the null device: Python flushes it at exit.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.error: OSError | None = None  # the first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text; its length."""
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._lasting():
            self._stream.flush()

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            first, self.error = self.error is None, self.error or error
            to_null(self._stream)
            if first and self._name != "stderr":
                print(f"klrl: {self._name}: {error}; goes on without", file=sys.stderr, flush=True)


def to_null(stream: TextIO) -> None:
    """Lead a stream's descriptor, if it has one, to the null device."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def lasting(name: str) -> Iterator[None]:
    """Let ``stdout`` or ``stderr`` outlive its reader."""
    before = getattr(sys, name)
    setattr(sys, name, LastingStream(before, name))
    try:
        yield
    finally:
        getattr(sys, name).flush()
        setattr(sys, name, before)


def open_closed_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed, as by ``>&-``, on the null device.

    Else the next file that is opened takes the descriptor, and what is printed.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor: this one, since those below are open.
            os.open(os.devnull, os.O_RDWR)
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
