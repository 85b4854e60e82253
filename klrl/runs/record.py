"""What a run leaves behind: its rows, its loggers, how it ended."""

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
from klrl.runs.loggers import JsonlLogger, Logger, Opened, Samples, read_rows
from klrl.runs.metrics import Row, metrics_of
from klrl.runs.progress import Progress, duration


@contextmanager
def keep_status(files: RunFolder, config: JobConfig, counters: Counters) -> Iterator[None]:
    """Keep ``manifest.json`` true about how the run ended, and draw its curves."""
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
            draw_curves(rows, files.curves, title, domain)
        if status != "finished":
            done = f"{counters.frames:,} {domain.axis}"
            print(f"{status} at {done}; run folder: {files.path}")


class Recorder:
    """Where the rows and samples of an open run go.

    Args:
        metrics: ``metrics.jsonl``.
        samples: ``samples.jsonl``.
        others: of the logger group.
        progress: what a person sees.
    """

    def __init__(
        self,
        metrics: JsonlLogger,
        samples: _SamplesFile,
        others: Sequence[Logger],
        progress: Progress,
    ) -> None:
        self._metrics, self._samples = metrics, samples
        self._others, self._progress = others, progress

    def record(self, row: Row) -> None:
        """Write an iteration's row, and show it."""
        self._metrics.log(row)
        for logger in self._others:
            logger.log(row)
        self._progress.show(row)

    def samples(self, samples: Samples) -> None:
        """Write what is to be looked at beside the next row."""
        self._samples.log(samples)
        for logger in self._others:
            logger.log_samples(samples)

    def say(self, text: str) -> None:
        """Print a line of its own."""
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
    """Open the run's files, its logger and the progress line; close them whatever happens."""
    domain = domain_of(config)
    after = counters.frames if resume else None
    metrics = JsonlLogger(files.metrics, after, domain.axis)
    samples = _SamplesFile(files.samples, after, domain.axis)
    total = config.iterations * config.frames_per_iteration
    opened = Opened(files.path, dataclasses.asdict(config), group, wandb_id, domain)
    logger = factory("logger", config.logger, config.domain)
    try:
        with (
            logger(config.logger, opened) as others,
            Progress(total, domain, done=counters.frames) as progress,
        ):
            yield Recorder(metrics, samples, others, progress)
    finally:
        metrics.close()
        samples.close()
    print(summary(files, config, counters.frames))


class _SamplesFile:
    """``samples.jsonl``, opened with its first samples: not every run has any.

    Args:
        path: the file.
        after: on resume, the frames of the checkpoint; what came later is dropped at once.
        axis: what counts them.
    """

    def __init__(self, path: Path, after: int | None, axis: str) -> None:
        self._path, self._axis = path, axis
        self._file = JsonlLogger(path, after, axis) if path.exists() else None

    def log(self, samples: Samples) -> None:
        """Append a line each."""
        self._file = self._file or JsonlLogger(self._path, None, self._axis)
        self._file.log_all(samples)

    def close(self) -> None:
        """Close the file, where it was opened."""
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
        held = [metrics[name] for name in ("kl/ref/exact", "kl/ref/penalty", "kl/ref/coef")]
        lines.append("  " + ", ".join(f"{m.title} {m.show(last[m.name])} {m.unit}" for m in held))
    return "\n".join([*lines, f"  run folder: {files.path}"])
