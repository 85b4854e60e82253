"""A line that is written anew in place: on a terminal, and in a notebook."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

#: A notebook keeps what it is sent: no more lines than this many seconds apart.
_NOTEBOOK_SECONDS = 0.2


class LiveLine:
    """The last line of a stream, which can be replaced.

    Args:
        stream: where to write.

    Attributes:
        live: whether the stream can show one; elsewhere :meth:`show` writes nothing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._notebook = type(stream).__module__.startswith("ipykernel")
        self.live = self._notebook or stream.isatty()
        self._shown = self._wanted = ""
        self._last = 0.0

    def show(self, text: str) -> None:
        """Put a text in the place of the last one."""
        self._wanted = text
        now = time.monotonic()
        if self.live and not (self._notebook and now - self._last < _NOTEBOOK_SECONDS):
            self._last = now
            self._replace(text)

    def say(self, text: str) -> None:
        """Write a line that stays; the live one comes after it."""
        self._stream.write(self._clear() + text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the live line away."""
        self._stream.write(self._clear())
        self._stream.flush()

    def end(self) -> None:
        """Leave the last text that was to be shown, and go on below it."""
        if self.live:
            if self._shown != self._wanted:
                self._replace(self._wanted)
            self._stream.write("\n")
            self._stream.flush()
            self._shown = self._wanted = ""

    def _replace(self, text: str) -> None:
        if not self._notebook:
            # A wrapped line could not be taken back.
            text = text[: shutil.get_terminal_size().columns - 1]
        self._stream.write(self._clear() + text)
        self._stream.flush()
        self._shown = text

    def _clear(self) -> str:
        """What takes the line away: a terminal's code, or spaces over it."""
        if not self.live:
            return ""
        before, self._shown = self._shown, ""
        return f"\r{' ' * len(before)}\r" if self._notebook else "\r\x1b[2K"
