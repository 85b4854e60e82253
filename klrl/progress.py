"""What a person sees while a run goes on: a live line, or plain lines without a terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from typing import TextIO

from klrl.domains import Domain
from klrl.metrics import Row, metrics_of

#: The live line shows the mean of so many scores of training: one rollout's is noisy.
_RECENT = 10
_SCORE = "reward/episode"


class Progress:
    """A live line on a terminal; elsewhere a plain line whenever 10 s went by without one.

    Args:
        frames: how many the run will have.
        domain: says what they count, and which metrics the line shows.
        done: how many it has already, on resume.
        stream: where to write; default stdout.
        every: seconds between plain lines.
    """

    def __init__(
        self,
        frames: int,
        domain: Domain,
        done: int = 0,
        stream: TextIO | None = None,
        every: float = 10.0,
    ) -> None:
        self._axis = domain.axis
        self._metrics = [metric for metric in metrics_of(domain).values() if metric.short]
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._total, self._start_frames, self._every = frames, done, every
        self._started = time.monotonic()
        self._printed = 0.0
        self._row: Row = {domain.axis: done}
        self._scores: deque[float] = deque(maxlen=_RECENT)
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        if not self._live:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._live:
            self._stream.write("\n")
        elif self._ticker.is_alive():
            self._ticker.join()
            self._print()

    def show(self, row: Row) -> None:
        """Take the newest row."""
        self._row = {**self._row, **row}
        if _SCORE in row:
            self._scores.append(row[_SCORE])
            self._row[_SCORE] = sum(self._scores) / len(self._scores)
        if self._live:
            # A wrapped line could not be taken back.
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[2K" + self.line()[:width])
            self._stream.flush()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._stream.write(("\r\x1b[2K" if self._live else "") + text + "\n")
        self._stream.flush()

    def line(self) -> str:
        """Frames, speed, the metrics that have a short name, and time left."""
        row = self._row
        frames = int(row[self._axis])
        passed = max(time.monotonic() - self._started, 1e-9)
        speed = (frames - self._start_frames) / passed
        parts = [f"{frames:,}/{self._total:,} {self._axis}", f"{speed:,.0f}/s"]
        for metric in self._metrics:
            if metric.name in row:
                parts.append(f"{metric.short} {metric.show(row[metric.name])}")
        if speed > 0:
            parts.append(f"{duration((self._total - frames) / speed)} left")
        return " | ".join(parts)

    def _tick(self) -> None:
        while not self._stop.wait(self._every):
            self._print()

    def _print(self) -> None:
        self._stream.write(self.line() + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """73.2 -> "1:13", 4000 -> "1:06:40"."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
