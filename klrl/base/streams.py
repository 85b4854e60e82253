"""Keeps a run alive after the reader of its output has ended, as with ``klrl ... | head -1``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream that ignores write errors; stdout reports its first error on stderr.

    After an error the stream writes to the null device, so that Python's flush at exit succeeds.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.error: OSError | None = None  # the first error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text if possible, and return its length."""
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text if possible."""
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
                print(f"klrl: {self._name}: {error}; the run goes on", file=sys.stderr, flush=True)


class NullStream(io.TextIOBase):
    """A text stream that drops what is written."""

    def write(self, text: str) -> int:
        """Return the length of a text."""
        return len(text)


def to_null(stream: TextIO) -> None:
    """Redirect a stream's descriptor, if it has one, to the null device."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def lasting(name: str) -> Iterator[None]:
    """Replace ``sys.stdout`` or ``sys.stderr`` by a :class:`LastingStream` inside the context."""
    before = getattr(sys, name)
    setattr(sys, name, LastingStream(before, name))
    try:
        yield
    finally:
        getattr(sys, name).flush()
        setattr(sys, name, before)


def open_closed_streams() -> None:
    """Connect closed standard streams, as after ``>&-``, to the null device.

    Otherwise the next file that klrl opens would get the free descriptor, and klrl would print
    into that file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open takes the lowest free descriptor, which is the closed one.
            os.open(os.devnull, os.O_RDWR)
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
