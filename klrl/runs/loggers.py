"""Logs rows to TensorBoard and other loggers, in addition to ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from klrl.base.errors import ConfigError
from klrl.base.files import make_folder
from klrl.config import CustomLoggerConfig, LoggerConfig, choice_of, factory
from klrl.config.own import import_target, make_own
from klrl.domains import Domain
from klrl.runs.guard import Guard
from klrl.runs.metrics import Row

#: Responses of an iteration, for ``samples.jsonl``: a mapping per response.
Samples = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Video:
    """The files of a filmed episode."""

    name: str  # such as ``videos/last``
    mp4: Path | None  # the film, for loggers that play MP4; None without an encoder
    gif: Path  # the same film, smaller
    size: tuple[int, int]  # of the GIF: width and height in pixels


class Logger:
    """Base class of loggers; by default, samples and videos are ignored."""

    part: str  # the logger's name for :class:`Guard`

    def log(self, row: Row) -> None:
        """Log one iteration's row."""
        raise NotImplementedError

    def log_samples(self, samples: Samples) -> None:
        """Log an iteration's responses; :meth:`log` then logs the iteration's row."""

    def log_video(self, video: Video, at: int) -> None:
        """Log a film of the policy after ``at`` frames or samples."""

    def close(self) -> None:
        """Write buffered data at the end of a run."""


#: The return type of each factory of ``logger``.
OpenLoggers: TypeAlias = AbstractContextManager[Sequence[Logger]]


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger logs."""

    folder: Path
    settings: dict[str, object]  # the job's settings, for wandb's config
    group: str | None  # the sweep's name; None outside a sweep
    run_id: str  # wandb's id; a resumed run keeps it, so that wandb continues the run
    domain: Domain
    guard: Guard  # calls the logger, which may fail without ending the run
    #: During training, reads the rows so far; None if a video is added to a finished run.
    rows: Callable[[], Sequence[Row]] | None = None
    note: Callable[..., None] | None = None  # stores its keyword arguments in the run's manifest


@contextmanager
def open_loggers(config: LoggerConfig, logged: LoggedRun) -> Iterator[Sequence[Logger]]:
    """Open the chosen logger, and those of ``logger.also`` with default settings."""
    with ExitStack() as stack:
        loggers: list[Logger] = []
        also = (choice_of("logger", name).schema(name=name) for name in config.also)
        for each in (config, *also):
            run = factory("logger", each, logged.domain.name)
            loggers += stack.enter_context(run(each, logged))
        yield loggers


def no_logger(config: LoggerConfig, logged: LoggedRun) -> OpenLoggers:
    """``logger=none``: open no logger; ``metrics.jsonl`` is written in any case."""
    return nullcontext(())


@contextmanager
def guarded(logged: LoggedRun, part: str, make: Callable[[], Logger]) -> Iterator[Sequence[Logger]]:
    """Open a logger that may fail without ending the run; close it at the end."""
    logger = logged.guard.call(part, make)
    try:
        yield () if logger is None else (logger,)
    finally:
        if logger is not None:
            logged.guard.call(part, logger.close)


def tensorboard_run(config: LoggerConfig, logged: LoggedRun) -> OpenLoggers:
    """``logger=tensorboard``: log to ``tensorboard/`` in the run folder, by TorchRL's logger."""
    return guarded(logged, _TensorboardLogger.part, lambda: _TensorboardLogger(logged))


class _TensorboardLogger(Logger):
    """Logs a scalar per metric, and settings and responses as text."""

    part = "tensorboard"

    def __init__(self, logged: LoggedRun) -> None:
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        folder = make_folder(logged.folder / self.part)
        # A resumed run computes some rows again, and TorchRL's logger cannot delete old rows. So
        # rewrite all files from metrics.jsonl, which no longer has the rows after the checkpoint.
        for old in folder.glob("events.out.tfevents.*") if logged.rows is not None else ():
            old.unlink()
        self._logger = TensorboardLogger(self.part, log_dir=str(logged.folder))
        self._axis, self._at = logged.domain.axis, 0
        if logged.rows is not None:
            self._text("settings", json.dumps(logged.settings, indent=2, default=str))
            for row in logged.rows():
                self.log(row)

    def log(self, row: Row) -> None:
        self._at = int(row[self._axis])
        for name, value in row.items():
            if value is not None:
                self._logger.log_scalar(name, value, step=self._at)

    def log_samples(self, samples: Samples) -> None:
        self._text("samples_shown", json.dumps(list(samples), indent=2, default=str))

    def log_video(self, video: Video, at: int) -> None:
        """Show the GIF; TorchRL's ``log_video`` would need moviepy to encode the film again."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = video.size
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=video.gif.read_bytes()
        )
        summary = Summary(value=[Summary.Value(tag=video.name, image=image)])
        self._logger.experiment.file_writer.add_summary(summary, at)

    def close(self) -> None:
        self._logger.shutdown()

    def _text(self, name: str, text: str) -> None:
        """Log a text as a block of Markdown that keeps its line breaks."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._logger.experiment.add_text(name, block, self._at)


def custom_run(config: CustomLoggerConfig, logged: LoggedRun) -> OpenLoggers:
    """``logger=custom``: make the user's logger; if it fails, the run continues without it."""
    given = {
        "folder": logged.folder,
        "settings": logged.settings,
        "group": logged.group,
        "axis": logged.domain.axis,
    }
    return guarded(logged, _UserLogger.part, lambda: _UserLogger(make_own("logger", config, given)))


def check_logger(config: CustomLoggerConfig) -> None:
    """Refuse a class without a method ``log``, before the run begins."""
    target = import_target("logger", config)
    if isinstance(target, type) and not callable(getattr(target, "log", None)):
        raise ConfigError(
            f"logger.target={config.target}: has no method log; add log(self, row), which takes a "
            "dictionary per iteration"
        )


class _UserLogger(Logger):
    """Calls the user's logger, whose optional methods replace those of the base class."""

    part = "logger"

    def __init__(self, logger: Any) -> None:
        if not callable(getattr(logger, "log", None)):
            raise TypeError(f"made {type(logger).__name__}, which has no method log")
        self._logger = logger
        for name in ("log_samples", "log_video", "close"):
            if callable(method := getattr(logger, name, None)):
                setattr(self, name, method)

    def log(self, row: Row) -> None:
        self._logger.log(dict(row))  # a copy, which the user may change
