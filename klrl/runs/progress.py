"""The progress of a run, printed: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TextIO

from klrl.base.text import LiveLine
from klrl.domains import Domain
from klrl.runs.guard import Guard
from klrl.runs.metrics import Row, metrics_of

#: The line shows the mean of this many training scores: one rollout's is noisy.
_RECENT = 10
_SCORE = "reward/episode"


class Progress:
    """A live line on a terminal or in a notebook; elsewhere a plain line every 10 s.

    Args:
        frames: the run's total.
        domain: names the axis and the metrics that the line shows.
        done: frames done before a resume.
        stream: where to write; default stdout.
        every: seconds between plain lines, which come only while the run moves on.
        guard: prints; default: one that notes failures nowhere.
    """

    def __init__(
        self,
        frames: int,
        domain: Domain,
        done: int = 0,
        stream: TextIO | None = None,
        every: float = 10.0,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard or Guard(lambda part, error: None)
        self._axis = domain.axis
        self._metrics = [metric for metric in metrics_of(domain).values() if metric.short]
        self._line = LiveLine(stream or sys.stdout)
        self._total, self._start_frames, self._every = frames, done, every
        self._started = time.monotonic()
        self._row: Row = {domain.axis: done}
        self._shown: Row | None = None
        self._scores: deque[float] = deque(maxlen=_RECENT)
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        if not self._line.live:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join()
            self._show()
        self._guard.call("progress", self._line.end)

    def show(self, row: Row) -> None:
        """Show the newest row."""
        self._row = {**self._row, **row}
        if _SCORE in row:
            self._scores.append(row[_SCORE])
            self._row[_SCORE] = sum(self._scores) / len(self._scores)
        if self._line.live:
            self._show()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._guard.call("progress", self._line.say, text)

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
            self._show()

    def _show(self) -> None:
        """Show the newest row, once: a minute of compiling is no progress."""
        if self._row is not self._shown:
            self._shown = self._row
            self._guard.call("progress", lambda: self._line.show(self.line()))


def duration(seconds: float) -> str:
    """73.2 -> "1:13", 4000 -> "1:06:40"."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
