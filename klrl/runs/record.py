"""Records a run: its rows, its samples and its status."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from klrl.base.errors import STOPS, OwnerError, in_one_line
from klrl.base.files import to_append
from klrl.base.screen import show_block
from klrl.base.text import escaped
from klrl.config import JobConfig
from klrl.domains import domain_of
from klrl.runs.checkpoint import Counters
from klrl.runs.curves import draw_curves
from klrl.runs.folder import Manifest, RunFolder
from klrl.runs.loggers import LoggedRun, Logger, Samples, open_loggers
from klrl.runs.metrics import Row, metrics_of
from klrl.runs.progress import Phases, Progress, duration
from klrl.runs.returns import advice, charged, evaluation_text, kl_lines, with_error
from klrl.runs.rows import RowFile, read_rows, rows_so_far
from klrl.runs.state import State


@contextmanager
def recording_status(files: RunFolder, config: JobConfig, counters: Counters) -> Iterator[None]:
    """Write the run's final status to ``manifest.json``, and draw its curves."""
    axis = domain_of(config).axis
    try:
        yield
    except OwnerError:
        raise  # the folder is gone, or another process owns it now
    except BaseException as error:
        if not isinstance(error, STOPS):
            status, text = "failed", in_one_line(error, limit=None)
        else:
            # A signal may come while a complete run closes its files. The last iteration's
            # checkpoint shows that the run is complete, since it is written last.
            last = files.checkpoints / "last" / f"frames-{counters.frames:012d}"
            complete, text = counters.iteration >= config.iterations and last.is_dir(), None
            status = "finished" if complete else "interrupted"
        with suppress(OSError):  # raise the first error instead
            files.close(status, **{axis: counters.frames}, error=text)
        if status == "failed":
            with suppress(Exception):  # raise the first error instead
                _draw(files, config, status)
        else:
            files.guard.call("curves.png", _draw, files, config, status)
        if status != "finished":
            then = f"run folder: {files.path}"
            if status == "interrupted" and files.checkpointed:
                then = f"continue with: klrl {shlex.quote(f'resume={files.path}')}"
            stopped = f"{status} at {counters.frames:,} {axis}; {escaped(then)}"
            files.guard.call("progress", print, stopped)
        raise
    files.close("finished", **{axis: counters.frames}, error=None)
    files.guard.call("curves.png", _draw, files, config, "finished")


def _draw(files: RunFolder, config: JobConfig, status: str) -> None:
    title = f"{config.title}  {files.path.name}  {status}"
    if rows := rows_so_far(files.place):
        draw_curves(rows, files.curves, title, domain_of(config))


@dataclasses.dataclass
class Recorder:
    """Writes the rows and samples of an open run."""

    _files: RunFolder
    _metrics: RowFile
    _samples: RowFile
    _loggers: Sequence[Logger]
    _progress: Progress
    _run: str

    def record(self, row: Row) -> None:
        """Write an iteration's row, and show it.

        Raises:
            OSError: see :meth:`check`; or writing failed, and no partial row is left.
            OwnerError: the run folder is gone, or another process took it over.
        """
        self.check()
        self._metrics.log(row)
        for logger in self._loggers:
            self._files.guard.call(logger.part, logger.log, row)
        self._progress.show(row)
        self._files.guard.check_streams()

    def samples(self, samples: Samples) -> None:
        """Write an iteration's responses; :meth:`record` then writes the iteration's row."""
        self.check()
        self._samples.log_all(samples)
        for logger in self._loggers:
            self._files.guard.call(logger.part, logger.log_samples, samples)

    def check(self) -> None:
        """Check that the folder is still this run's, with its manifest, settings and rows.

        Raises:
            OSError: a file is gone or was changed; the message says which.
            OwnerError: see :meth:`record`.
        """
        self._files.check_owned()
        self._files.check_stored()
        self._metrics.check()
        self._samples.check()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._progress.say(text)

    def marks(self) -> dict[str, object]:
        """Return the run's id and the :meth:`RowFile.mark` of each file, for the checkpoint."""
        self.check()
        files = {self._files.metrics.name: self._metrics, self._files.samples.name: self._samples}
        return {"run": self._run, "rows": {name: file.mark() for name, file in files.items()}}


@contextmanager
def recording(
    files: RunFolder,
    config: JobConfig,
    counters: Counters,
    *,
    late: ExitStack,
    group: str | None,
    manifest: Manifest,
    marks: State | None,
    phases: Phases | None = None,
) -> Iterator[Recorder]:
    """Open the run's files, loggers and progress line; close them even after an error.

    ``late`` closes the loggers, once the status is written, since wandb's uploads may take long.
    ``group`` is the job's sweep, if any. On resume, ``marks`` is the checkpoint's metadata, which
    contains :meth:`Recorder.marks`.
    """
    domain = domain_of(config)
    after = None if marks is None else counters.frames
    rows, run = (marks or {}).get("rows", {}), manifest["id"]
    to_append(files.metrics).close()  # creates the file, which loggers read
    metrics, samples = (
        RowFile(path, domain.axis, after, rows.get(path.name), run)
        for path in (files.metrics, files.samples)
    )
    total = config.iterations * config.frames_per_iteration
    settings, guard = dataclasses.asdict(config), files.guard
    so_far = partial(read_rows, files.metrics)
    logged = LoggedRun(
        files.place, settings, group, manifest["wandb_id"], domain, guard, so_far, files.update
    )
    try:
        loggers = late.enter_context(open_loggers(config.logger, logged))
        with Progress(total, domain, done=counters.frames, guard=guard, phases=phases) as progress:
            recorder = Recorder(files, metrics, samples, loggers, progress, run)
            yield recorder
            recorder.check()
    finally:
        metrics.close()
        samples.close()
    guard.call("progress", show_block, summary(files, config, counters.frames))


def _evaluated(row: Row, config: JobConfig) -> list[str]:
    """Format the last row's evaluations: of the last policy, and of the best checkpoint."""
    if "eval/return" not in row and "eval/cut" not in row:
        return []
    domain, best = domain_of(config), "eval/best_return"
    lines = [evaluation_text(row, domain, domain.how(config), row.get("time/evaluation"))]
    lines += kl_lines(row, domain)
    if best in row:
        same = row[best] == row.get("eval/return")  # the last policy is the best, or equally good
        value = with_error(row, best, domain)
        shown = f"the same {domain.score}" if same else f"{domain.score} {value}"
        by = "nll/held_out" if config.collector.imitates else "the evaluations during the run"
        lines.append(f"best checkpoint, by {by}: {shown}")
    return lines


def summary(files: RunFolder, config: JobConfig, frames: int) -> str:
    """Format the closing lines of a finished run."""
    domain = domain_of(config)
    metrics = metrics_of(domain)
    rows = rows_so_far(files.place)
    last = rows[-1] if rows else {}
    times = ("time/iteration", "time/sampling")
    seconds, sampling = (sum(row.get(name, 0.0) for row in rows) for name in times)
    lines = [f"finished {frames:,} {domain.axis} in {duration(seconds)}"]
    lines += [f"  {line}" for line in _evaluated(last, config)]
    if kl := next((name for name in ("kl/ref/exact", "kl/ref/k3") if name in last), None):
        names = (kl, "div/ref/charged", "kl/ref/penalty", "kl/ref/coef")
        shown = [metrics[name] for name in names if name in last]
        # With kl.placement=loss, no reward is charged.
        row = {**last, "kl/ref/penalty": last.get("kl/ref/penalty") or charged(last)}
        lines.append(
            "  training: " + ", ".join(f"{m.title} {m.show(row[m.name])} {m.unit}" for m in shown)
        )
    lines += [f"  {line}" for line in advice(rows, config, domain)]
    if (collector := files.manifest.get("collector")) and seconds:
        each = f"{1e6 * sampling / frames:,.0f} us per {domain.axis[:-1]}"
        lines.append(f"  rollouts: {collector}: {each}, {sampling / seconds:.0%} of the time")
    return "\n".join([*lines, f"  run folder: {escaped(str(files.path))}"])
