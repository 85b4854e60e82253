"""Loggers of rows besides ``metrics.jsonl``: several at once, wandb's in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from klrl.base.files import make_folder, refuse_link
from klrl.config import LoggerConfig, choice_of, factory
from klrl.domains import Domain
from klrl.runs.guard import Guard
from klrl.runs.metrics import Row

if TYPE_CHECKING:
    from torchrl.record.loggers.common import Logger as TorchRLLogger

#: The responses of an iteration that go to ``samples.jsonl``, one mapping each.
Samples = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Video:
    """An episode that was filmed."""

    name: str  # as ``videos/last``
    mp4: Path | None  # the film, for loggers that play it; None without an encoder
    gif: Path  # the same, smaller
    size: tuple[int, int]  # of the GIF: width and height in pixels


class Logger:
    """A logger besides ``metrics.jsonl``; what it does not show, it leaves out."""

    part: str  # what Guard calls it

    def log(self, row: Row) -> None:
        """Log one iteration's row."""
        raise NotImplementedError

    def log_samples(self, samples: Samples) -> None:
        """Log responses, to be shown with the next row."""

    def log_video(self, video: Video, at: int) -> None:
        """Log a film of the policy as it was at a position on the domain's axis."""

    def close(self) -> None:
        """Write what is left, at the end of a run."""


#: What each choice of ``logger`` returns.
Running: TypeAlias = AbstractContextManager[Sequence[Logger]]


@dataclass(frozen=True)
class Opened:
    """The run for which a logger is opened."""

    folder: Path
    settings: dict[str, object]  # the job's settings, for wandb's config
    group: str | None  # the sweep's name
    run_id: str  # wandb's id; a resumed run has the same, so that wandb continues it
    domain: Domain
    guard: Guard  # calls the logger, which may fail without ending the run
    #: Those of a run that trains, so far; None for a finished run, to which a video is added.
    rows: Callable[[], Sequence[Row]] | None = None
    note: Callable[..., None] | None = None  # stores entries in the run's manifest


@contextmanager
def open_loggers(config: LoggerConfig, opened: Opened) -> Iterator[Sequence[Logger]]:
    """The chosen logger, and those of ``logger.also``, which have default settings."""
    with ExitStack() as stack:
        loggers: list[Logger] = []
        also = (choice_of("logger", name).schema(name=name) for name in config.also)
        for each in (config, *also):
            run = factory("logger", each, opened.domain.name)
            loggers += stack.enter_context(run(each, opened))
        yield loggers


def no_run(config: LoggerConfig, opened: Opened) -> Running:
    """``logger=none``: ``metrics.jsonl`` is written in any case."""
    return nullcontext(())


@contextmanager
def guarded(opened: Opened, part: str, begin: Callable[[], Logger]) -> Iterator[Sequence[Logger]]:
    """A logger that may fail without ending the run; it is closed at the end."""
    logger = opened.guard.call(part, begin)
    try:
        yield () if logger is None else (logger,)
    finally:
        if logger is not None:
            opened.guard.call(part, logger.close)


def _in_folder(
    make: type[_TensorboardLogger | _CSVLogger], config: LoggerConfig, opened: Opened
) -> Running:
    # TorchRL's cannot take back the rows that a resumed run trains again: its files are made anew
    # from metrics.jsonl, which was cut at the checkpoint.
    def begin() -> _TorchRLLogger:
        for each in make_folder(opened.folder / make.part).rglob("*"):
            refuse_link(each)
        if opened.rows is not None:
            for old in (opened.folder / make.part).glob(make.written):
                old.unlink()
        logger = make(opened)
        for row in opened.rows() if opened.rows is not None else ():
            logger.log(row)
        return logger

    return guarded(opened, make.part, begin)


class _TorchRLLogger(Logger):
    """A logger of TorchRL's, one scalar per metric."""

    written: str  # the files of rows, in its folder

    def __init__(self, logger: TorchRLLogger, axis: str) -> None:
        self._logger, self._axis, self._at = logger, axis, 0

    def log(self, row: Row) -> None:
        """Log each metric against the domain's axis."""
        self._at = int(row[self._axis])
        for name, value in row.items():
            if value is not None:
                self._logger.log_scalar(name, value, step=self._at)

    def close(self) -> None:
        """Write what is left."""
        self._logger.shutdown()


class _CSVLogger(_TorchRLLogger):
    """TorchRL's, whose folder of videos would take tensors only."""

    part, written = "csv", "scalars/**/*.csv"

    def __init__(self, opened: Opened) -> None:
        from torchrl.record.loggers.csv import CSVLogger

        super().__init__(CSVLogger(self.part, log_dir=str(opened.folder)), opened.domain.axis)


class _TensorboardLogger(_TorchRLLogger):
    """TorchRL's, with the run's settings and, for language, responses as text."""

    part, written = "tensorboard", "events.out.tfevents.*"

    def __init__(self, opened: Opened) -> None:
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        logger = TensorboardLogger(self.part, log_dir=str(opened.folder))
        super().__init__(logger, opened.domain.axis)
        if opened.rows is not None:
            self._text("settings", json.dumps(opened.settings, indent=2, default=str))

    def log_samples(self, samples: Samples) -> None:
        """Show responses beside the row before."""
        self._text("samples_shown", json.dumps(list(samples), indent=2, default=str))

    def log_video(self, video: Video, at: int) -> None:
        """Show the GIF; TorchRL's ``log_video`` would encode it again, and needs moviepy."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = video.size
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=video.gif.read_bytes()
        )
        summary = Summary(value=[Summary.Value(tag=video.name, image=image)])
        self._logger.experiment.file_writer.add_summary(summary, at)

    def _text(self, name: str, text: str) -> None:
        """As a block of Markdown that keeps its lines."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._logger.experiment.add_text(name, block, self._at)


#: ``logger=tensorboard``: TorchRL's TensorboardLogger, in the run folder's ``tensorboard/``.
tensorboard_run = partial(_in_folder, _TensorboardLogger)
#: ``logger=csv``: TorchRL's CSVLogger, a file for each metric in ``csv/scalars``.
csv_run = partial(_in_folder, _CSVLogger)
