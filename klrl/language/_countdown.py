"""What a person sees while the base model is made: a live line, else plain lines."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from klrl.progress import duration


class Countdown:
    """A bar on a terminal; elsewhere a plain line whenever 10 s went by, and a last one.

    Args:
        title: what is being made.
        unit: of what is counted, as in "of at most 600 updates".
        stream: where to write; default stderr, so that what a command prints stays clean.
        every: seconds between plain lines.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        stream: TextIO | None = None,
        every: float = 10.0,
    ) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._title, self._unit, self._every = title, unit, every
        self._started = self._printed = time.monotonic()
        self._line = ""

    def __enter__(self) -> Countdown:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.write("\n" if self._live else self._line + "\n")
        self._stream.flush()

    def show(self, done: int, note: str) -> None:
        """Tell how far it is."""
        now = time.monotonic()
        self._line = (
            f"{self._title} | {done:,} {self._unit} | {note} | {duration(now - self._started)}"
        )
        if self._live:
            # A wrapped line could not be taken back.
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[2K" + self._line[:width])
            self._stream.flush()
        elif now - self._printed >= self._every:
            self._printed = now
            self._stream.write(self._line + "\n")
            self._stream.flush()
