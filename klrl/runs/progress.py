"""Prints the progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from klrl.base.digits import number
from klrl.base.screen import console_of, styled
from klrl.base.text import escaped_lines
from klrl.domains import Domain
from klrl.runs.guard import Guard
from klrl.runs.metrics import Row, metrics_of

#: Number of rollouts over which the line averages the score, which is noisy.
_RECENT = 10
_SCORE, _ITERATION = "reward/episode", "time/iteration"
#: Below this number of frames per second, the line shows seconds per iteration.
_QUICK = 10.0
#: Seconds between updates of a bar.
_LIVE_SECONDS = 1.0
#: Matches opening lines that a terminal shows in one line, unless klrl was called with ``-v``.
_ROUTINE = re.compile(r"(preflight)(?=: .*\) ok$)|(?:evaluations|reference|rollouts|update)(?=: )")


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
    """Shows a bar on a terminal; elsewhere a plain line every 10 s.

    While no new row arrives, the current phase is shown: every second on a terminal, elsewhere once
    per phase. ``done``: the number of frames before the run resumed.
    """

    #: Whether a terminal shows every line; ``klrl -v`` sets it.
    verbose = False

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
        # Metrics that each iteration has come first.
        self._metrics = sorted(metrics, key=lambda metric: metric.name.startswith("eval/"))
        self._stream = stream or sys.stdout
        self._console = console_of(self._stream)
        if self._console:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
        self._total, self._done, self._every = frames, done, every
        # Time and frames after iteration 1. The speed leaves out iteration 1, which may compile.
        self._first: tuple[float, int] | None = None
        self._phases = phases or Phases()
        self._row: Row = {domain.axis: done}
        self._shown: tuple[Row, str] | None = None
        self._scores: deque[float] = deque(maxlen=_RECENT)
        self._routine: list[str] = []
        self._stop, self._lock = threading.Event(), threading.RLock()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        if self._console:
            self._guard.call("progress", self._live.start)
            self._console.show_cursor()  # a killed process would leave it hidden
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._ticker.join()
        self._show()
        if self._console:
            self._live.stop()

    def show(self, row: Row) -> None:
        """Show the newest row."""
        if self._routine and self._shown is None:
            self.say(f"checked: {', '.join(dict.fromkeys(self._routine))}; -v shows them")
        self._row = {**self._row, **row}
        frames = int(self._row[self._axis])
        if self._first is None and frames > self._done:
            self._first = time.monotonic(), frames
        if _SCORE in row:
            self._scores.append(row[_SCORE])
            self._row[_SCORE] = sum(self._scores) / len(self._scores)
        if self._console:
            self._show()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        with self._lock:
            self._guard.call("progress", self._say, text)

    def _say(self, text: str) -> None:
        if not self._console:
            print(escaped_lines(text), file=self._stream, flush=True)
        elif self.verbose or not (found := _ROUTINE.match(text)):
            self._console.print(styled(text))
        else:
            self._routine.append(found[0])

    def line(self) -> str:
        """Format frames, metrics with a short name, and, from iteration 2, speed and time left."""
        about, metrics, left = self._fields()
        return " | ".join([*about, *metrics, *left])

    def _fields(self) -> tuple[list[str], list[str], list[str]]:
        row = self._row
        frames = int(row[self._axis])
        began, start = self._first or (0.0, frames)
        speed = (frames - start) / max(time.monotonic() - began, 1e-9)  # 0 in iteration 1
        about = [f"{frames:,}/{self._total:,} {self._axis}"]
        if speed >= _QUICK:
            about.append(f"{speed:,.0f}/s")
        elif _ITERATION in row:
            about.append(f"{number(row[_ITERATION], 3)} s/iteration")
        known = [each for each in self._metrics if each.name in row and each.unless not in row]
        metrics = [f"{metric.short} {metric.show(row[metric.name])}" for metric in known]
        left = [f"{duration((self._total - frames) / speed)} left"] if speed > 0 else []
        return about, metrics, left

    def _tick(self) -> None:
        while not self._stop.wait(_LIVE_SECONDS if self._console else self._every):
            if self._row is not (self._shown or (None,))[0]:
                self._show()
            elif self._phases.name:
                self._show_phase()

    def _show(self) -> None:
        if self._row is not (self._shown or (None,))[0]:
            self._shown = self._row, ""
            self._write()

    def _show_phase(self) -> None:
        now = self._row, self._phases.name
        if self._console or now != self._shown:
            self._shown = now
            self._write([f"{now[1]} {self._phases.seconds:.0f} s"])

    def _write(self, phase: Sequence[str] = ()) -> None:
        with self._lock:
            self._guard.call("progress", self._draw, phase)

    def _draw(self, phase: Sequence[str]) -> None:
        if not self._console:
            print(" | ".join([self.line(), *phase]), file=self._stream, flush=True)
            return
        from rich.columns import Columns
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        about, metrics, left = self._fields()
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        done = ProgressBar(self._total, self._row[self._axis])
        bar.add_row(done, "  ".join([*about, *left, *phase]))
        self._live.update(Group(bar, Columns(metrics, padding=(0, 3))), refresh=True)


def duration(seconds: float) -> str:
    """Format seconds: 73.2 -> "1:13", 4000 -> "1:06:40"."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
