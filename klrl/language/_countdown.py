"""What a person sees while the base model is made: a live line, else plain lines."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from klrl.base.live import LiveLine
from klrl.runs.progress import duration


class Countdown:
    """A live line on a terminal or in a notebook; elsewhere a line every 10 s, and a last one.

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
        self._live = LiveLine(self._stream)
        self._title, self._unit, self._every = title, unit, every
        self._started = self._printed = time.monotonic()
        self._text = ""

    def __enter__(self) -> Countdown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live.live:
            self._live.end()
        else:
            self._live.say(self._text)

    def show(self, done: int, note: str) -> None:
        """Tell how far it is."""
        now = time.monotonic()
        self._text = (
            f"{self._title} | {done:,} {self._unit} | {note} | {duration(now - self._started)}"
        )
        if self._live.live:
            self._live.show(self._text)
        elif now - self._printed >= self._every:
            self._printed = now
            self._live.say(self._text)
