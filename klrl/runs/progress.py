"""Prints the progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from klrl.base.digits import number
from klrl.base.text import LiveLine
from klrl.domains import Domain
from klrl.runs.guard import Guard
from klrl.runs.metrics import Row, metrics_of

#: Number of rollouts over which the line averages the score, which is noisy.
_RECENT = 10
_SCORE, _ITERATION = "reward/episode", "time/iteration"
#: Below this number of frames per second, the line shows seconds per iteration.
_QUICK = 10.0
#: Seconds between updates of a live line.
_LIVE_SECONDS = 1.0


class Phases:
    """Measures the seconds of each phase of an iteration, and names the current phase."""

    def __init__(self) -> None:
        self.name = ""
        self._began = 0.0
        self._seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """Begin a phase and end the previous one; an empty name only ends the previous one."""
        now = time.perf_counter()
        if self.name:
            self._seconds[self.name] = self._seconds.get(self.name, 0.0) + now - self._began
        self.name, self._began = name, now

    @property
    def seconds(self) -> float:
        """Seconds since the current phase began."""
        return time.perf_counter() - self._began

    def take(self) -> dict[str, float]:
        """End the phase; return the seconds of each phase since the last call of ``take``."""
        self("")
        seconds, self._seconds = self._seconds, {}
        return seconds


class Progress:
    """Shows a live line on a terminal; elsewhere a plain line every 10 s.

    While no new row arrives, the line ends with the current phase: every second on a terminal,
    elsewhere once per phase. ``done``: the number of frames before the run resumed.
    """

    def __init__(
        self,
        frames: int,
        domain: Domain,
        done: int = 0,
        stream: TextIO | None = None,
        every: float = 10.0,
        guard: Guard | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._guard = guard or Guard(lambda part, error: None)
        self._axis = domain.axis
        metrics = [metric for metric in metrics_of(domain).values() if metric.short]
        # Metrics that each iteration has come first: a narrow terminal leaves out the last ones.
        self._metrics = sorted(metrics, key=lambda metric: metric.name.startswith("eval/"))
        self._line = LiveLine(stream or sys.stdout)
        self._total, self._done, self._every = frames, done, every
        # Time and frames after iteration 1. The speed leaves out iteration 1, which may compile.
        self._first: tuple[float, int] | None = None
        self._phases = phases or Phases()
        self._row: Row = {domain.axis: done}
        self._shown: tuple[Row, str] | None = None
        self._scores: deque[float] = deque(maxlen=_RECENT)
        self._stop, self._lock = threading.Event(), threading.RLock()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._ticker.join()
        if not self._line.live:
            self._show()
        self._guard.call("progress", self._line.close)

    def show(self, row: Row) -> None:
        """Show the newest row."""
        self._row = {**self._row, **row}
        frames = int(self._row[self._axis])
        if self._first is None and frames > self._done:
            self._first = time.monotonic(), frames
        if _SCORE in row:
            self._scores.append(row[_SCORE])
            self._row[_SCORE] = sum(self._scores) / len(self._scores)
        if self._line.live:
            self._show()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        with self._lock:
            self._guard.call("progress", self._line.say, text)

    def line(self) -> str:
        """Format frames, metrics with a short name, and, from iteration 2, speed and time left."""
        row = self._row
        frames = int(row[self._axis])
        began, start = self._first or (0.0, frames)
        speed = (frames - start) / max(time.monotonic() - began, 1e-9)  # 0 in iteration 1
        parts = [f"{frames:,}/{self._total:,} {self._axis}"]
        if speed >= _QUICK:
            parts.append(f"{speed:,.0f}/s")
        elif _ITERATION in row:
            parts.append(f"{number(row[_ITERATION], 3)} s/iteration")
        for metric in self._metrics:
            if metric.name in row:
                parts.append(f"{metric.short} {metric.show(row[metric.name])}")
        if speed > 0:
            parts.append(f"{duration((self._total - frames) / speed)} left")
        return " | ".join(parts)

    def _tick(self) -> None:
        while not self._stop.wait(_LIVE_SECONDS if self._line.live else self._every):
            if self._row is not (self._shown or (None,))[0]:
                self._show()
            elif self._phases.name:
                self._show_phase()

    def _show(self) -> None:
        if self._row is not (self._shown or (None,))[0]:
            self._shown = self._row, ""
            self._write(self.line)

    def _show_phase(self) -> None:
        now = self._row, self._phases.name
        if self._line.live or now != self._shown:
            self._shown = now
            self._write(lambda: f"{self.line()} | {now[1]} {self._phases.seconds:.0f} s")

    def _write(self, text: Callable[[], str]) -> None:
        with self._lock:
            self._guard.call("progress", lambda: self._line.show(text()))


def duration(seconds: float) -> str:
    """Format seconds: 73.2 -> "1:13", 4000 -> "1:06:40"."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
