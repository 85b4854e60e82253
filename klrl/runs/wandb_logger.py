"""``logger=wandb``: logs each job to a wandb run, offline if the server does not accept it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from klrl.base.errors import Interrupted
from klrl.base.files import refuse_link
from klrl.config import WandbConfig
from klrl.runs.loggers import LoggedRun, Logger, Samples, Video
from klrl.runs.machine import wandb_mode
from klrl.runs.metrics import Row, metrics_of

#: Time limits in seconds: for wandb's server to accept a new run, and to receive the last uploads.
_INIT_SECONDS, _FINISH_SECONDS = 20.0, 120.0


class _WandbLogger(Logger):
    """Logs rows to a wandb run, against frames or samples."""

    part = "wandb"

    def __init__(self, run: Any, axis: str) -> None:
        self._run, self._axis = run, axis
        self._table: dict[str, object] = {}

    def log(self, row: Row) -> None:
        self._run.log({**row, **self._table})
        self._table = {}

    def log_samples(self, samples: Samples) -> None:
        """Make a table of responses, which :meth:`log` logs with the next row."""
        import wandb

        names = list(samples[0])
        # Convert lists to text, since a column must have a single type.
        rows = [
            [json.dumps(x) if isinstance(x := sample[n], list | dict) else x for n in names]
            for sample in samples
        ]
        self._table = {"samples_shown": wandb.Table(columns=names, data=rows)}

    def log_video(self, video: Video, at: int) -> None:
        import wandb

        film = video.mp4 or video.gif
        shown = wandb.Video(str(film), format=film.suffix[1:])
        self._run.log({self._axis: at, video.name: shown})


@contextmanager
def wandb_run(config: WandbConfig, logged: LoggedRun) -> Iterator[Sequence[Logger]]:
    """``logger=wandb``: open a wandb run; an exception in the context marks it as failed.

    Without a server, the run is logged offline. If wandb itself fails, the job runs without it.
    """
    run = logged.guard.call(_WandbLogger.part, _open_run, config, logged)
    # Not `with run`: wandb would print its own traceback, even for Ctrl-C.
    code = 1
    try:
        yield () if run is None else (_WandbLogger(run, logged.domain.axis),)
        code = 0
    except Interrupted as stop:
        code = stop.exit_code
        raise
    finally:
        if run is not None:
            logged.guard.call(_WandbLogger.part, run.finish, exit_code=code)
        if logged.guard.has_failed(_WandbLogger.part):
            _end_service()


def _open_run(config: WandbConfig, logged: LoggedRun) -> Any:
    """Open a wandb run, offline if the server does not accept it; define the run's metrics."""
    mode = wandb_mode(config.mode)
    try:
        run = _init(config, logged, mode)
    except Exception as error:
        if mode != "online":
            raise
        _end_service()
        logged.guard.failed("wandb's server", error, "logs offline; wandb sync uploads it later")
        run = _init(config, logged, "offline")
    if logged.note is not None and run.id != logged.run_id:  # a wandb agent chose the id
        logged.note(wandb_id=run.id)
    axis = logged.domain.axis
    for metric in metrics_of(logged.domain).values():
        step = None if metric.name == axis else axis
        # Hide counts: most of their charts are straight lines.
        run.define_metric(metric.name, step_metric=step, hidden=metric.digits == 0)
    run.define_metric("*", step_metric=axis)  # for the table of responses, which is not declared
    return run


def _init(config: WandbConfig, logged: LoggedRun, mode: Any) -> Any:
    import wandb

    folder, group = logged.folder, logged.group
    refuse_link(folder / "wandb")
    return wandb.init(
        project=config.project,
        entity=config.entity,
        tags=list(config.tags),
        group=group,
        job_type="train",
        name=f"{group}/{folder.name}" if group else folder.name,
        id=logged.run_id,
        resume="allow",
        # Absolute, since wandb's service, one per process, may run in a different folder.
        dir=str(folder.resolve()),
        config=logged.settings,
        mode=mode,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=_FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )


def _end_service() -> None:
    """End wandb's service, which otherwise keeps the run's id in use and prints a traceback."""
    import wandb

    with suppress(Exception):
        wandb.teardown()
