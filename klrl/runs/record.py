"""Records a run: its rows, its samples, its status."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from klrl.base.errors import Interrupted, in_one_line
from klrl.config import JobConfig, factory
from klrl.domains import domain_of
from klrl.runs.checkpoint import Counters
from klrl.runs.curves import draw_curves
from klrl.runs.folder import RunFolder
from klrl.runs.guard import Guard
from klrl.runs.loggers import JsonlLogger, Logger, Opened, Samples, read_rows
from klrl.runs.metrics import Row, metrics_of
from klrl.runs.progress import Progress, duration


@contextmanager
def keep_status(files: RunFolder, config: JobConfig, counters: Counters) -> Iterator[None]:
    """Write the run's final status to ``manifest.json``, and draw its curves."""
    status, domain = "failed", domain_of(config)
    more: dict[str, Any] = {"error": None}
    try:
        yield
        status = "finished"
    except (Interrupted, KeyboardInterrupt):
        status = "interrupted"
        raise
    except Exception as error:
        more["error"] = in_one_line(error, limit=None)
        raise
    finally:
        files.close(status, **{domain.axis: counters.frames}, **more)
        rows = read_rows(files.metrics) if files.metrics.exists() else []
        if rows:
            title = f"{config.title}  {files.path.name}  {status}"
            files.guard.call("curves.png", draw_curves, rows, files.curves, title, domain)
        if status != "finished":
            done = f"{counters.frames:,} {domain.axis}"
            files.guard.call("progress", print, f"{status} at {done}; run folder: {files.path}")


class Recorder:
    """Writes the rows and samples of an open run.

    Args:
        metrics: ``metrics.jsonl``.
        samples: ``samples.jsonl``.
        loggers: those of the logger group.
        progress: the printed progress.
        guard: calls loggers and progress.
    """

    def __init__(
        self,
        metrics: JsonlLogger,
        samples: _SamplesFile,
        loggers: Sequence[Logger],
        progress: Progress,
        guard: Guard,
    ) -> None:
        self._metrics, self._samples = metrics, samples
        self._loggers, self._progress, self._guard = loggers, progress, guard

    def record(self, row: Row) -> None:
        """Write an iteration's row, and show it."""
        self._metrics.log(row)
        for logger in self._loggers:
            self._guard.call(logger.part, logger.log, row)
        self._progress.show(row)
        self._guard.check_streams()

    def samples(self, samples: Samples) -> None:
        """Write responses, to be shown with the next row."""
        self._samples.log(samples)
        for logger in self._loggers:
            self._guard.call(logger.part, logger.log_samples, samples)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._progress.say(text)


@contextmanager
def recording(
    files: RunFolder,
    config: JobConfig,
    counters: Counters,
    *,
    group: str | None,
    wandb_id: str,
    resume: bool,
) -> Iterator[Recorder]:
    """Open the run's files, its logger and the progress line; close them even after an error."""
    domain = domain_of(config)
    after = counters.frames if resume else None
    metrics = JsonlLogger(files.metrics, after, domain.axis)
    samples = _SamplesFile(files.samples, after, domain.axis)
    total = config.iterations * config.frames_per_iteration
    settings, guard = dataclasses.asdict(config), files.guard
    opened = Opened(files.path, settings, group, wandb_id, domain, guard)
    logger = factory("logger", config.logger, config.domain)
    try:
        with (
            logger(config.logger, opened) as loggers,
            Progress(total, domain, done=counters.frames, guard=guard) as progress,
        ):
            yield Recorder(metrics, samples, loggers, progress, guard)
    finally:
        metrics.close()
        samples.close()
    guard.call("progress", print, summary(files, config, counters.frames))


class _SamplesFile:
    """``samples.jsonl``, made with the first samples, since not every run has any.

    Args:
        path: the file.
        after: on resume, the frames of the checkpoint; later samples are dropped at once.
        axis: the metric that counts the frames.
    """

    def __init__(self, path: Path, after: int | None, axis: str) -> None:
        self._path, self._axis = path, axis
        self._file = JsonlLogger(path, after, axis) if path.exists() else None

    def log(self, samples: Samples) -> None:
        """Append one line per sample."""
        self._file = self._file or JsonlLogger(self._path, None, self._axis)
        self._file.log_all(samples)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()


def summary(files: RunFolder, config: JobConfig, frames: int) -> str:
    """The closing lines of a finished run."""
    domain = domain_of(config)
    metrics = metrics_of(domain)

    rows = read_rows(files.metrics)
    last = rows[-1] if rows else {}
    passed = duration(sum(r["time/iteration"] for r in rows))
    lines = [f"finished {frames:,} {domain.axis} in {passed}"]
    evaluated = [row["eval/return"] for row in rows if "eval/return" in row]
    if evaluated:
        score = metrics["eval/return"]
        now, best = score.show(evaluated[-1]), score.show(max(evaluated))
        lines.append(f"  {score.title} {now} (best {best})")
    if "kl/ref/exact" in last:
        shown = [metrics[name] for name in ("kl/ref/exact", "kl/ref/penalty", "kl/ref/coef")]
        lines.append("  " + ", ".join(f"{m.title} {m.show(last[m.name])} {m.unit}" for m in shown))
    return "\n".join([*lines, f"  run folder: {files.path}"])
