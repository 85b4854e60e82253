"""Runs one job in the process that a launcher chose; returns an outcome instead of raising."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import platform
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

from klrl.base.errors import FAILURES, STOPS, ConfigError, Interrupted, in_one_line
from klrl.base.files import to_append, to_update
from klrl.base.imports import import_for_good
from klrl.config.overrides import parse
from klrl.config.own.trust import name_code
from klrl.domains import domain_of
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_machine
from klrl.runs.one_run import forget_start
from klrl.runs.owner import OwnedElsewhere
from klrl.sweep.jobs import Job, Outcome, recorded_identity

#: While this file is in the sweep's folder, waiting jobs do not begin.
STOP_FILE = ".stop"
#: Seconds between checks that the sweep's process is alive.
_LOOK = 0.5


def run_job(job: Job) -> Outcome:
    """Run a job to its end, or resume it if it has a checkpoint."""
    started = time.monotonic()
    outcome = _outcome(job)
    gc.collect()  # frees networks in reference cycles: the next job may need the memory
    return dataclasses.replace(outcome, seconds=time.monotonic() - started)


def run_logged(job: Job) -> Outcome:
    """Run a job that prints to ``log.txt``; if the sweep is stopping, do not begin the job."""
    if (job.folder.parent / STOP_FILE).exists():
        return Outcome(job.name, "waiting")
    # Leave the terminal's process group: Ctrl-C must reach only the sweep, which passes it on once.
    # A second signal would stop the run without a checkpoint.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it
    with _printing_to(job.log):
        return run_job(job)


@cache
def hold_device(locks: Path, slots: Sequence[int]) -> BinaryIO:
    """Lock a free slot, a job's place on a CUDA device, until this process ends; use the device."""
    import torch

    for number, device in enumerate(slots):
        file = to_update(locks / str(number))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            torch.cuda.set_device(device)
            break
        except BlockingIOError:
            file.close()
    return file  # closed if no slot was free: then the job uses the default device


def run_for(sweep: int, job: Job, locks: Path, slots: Sequence[int]) -> Outcome:
    """Run a job in a child of the sweep's process; if the sweep dies, stop with a checkpoint."""

    def alone() -> bool:
        return sweep not in (os.getpid(), os.getppid())

    def watch() -> None:
        while not ended.wait(_LOOK):
            if alone():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    ended = threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    try:
        if slots and job.placed:
            hold_device(locks, slots)
        return run_logged(job)
    finally:
        ended.set()
        if alone():
            os._exit(1)  # no process is left to receive the outcome; begin no other job


def _outcome(job: Job) -> Outcome:
    signum = None
    try:
        signum = _run(job)
    except OwnedElsewhere:
        return Outcome(job.name, "running elsewhere")
    except ConfigError as error:
        if job.folder.is_dir() and set(job.folder.iterdir()) == {job.log}:
            shutil.rmtree(job.folder, ignore_errors=True)  # contains only a log
        return Outcome(job.name, "refused", str(error))
    except STOPS as stop:
        signum = stop.signum if isinstance(stop, Interrupted) else signal.SIGINT
        run = RunFolder(job.folder)  # the signal may have come after the run finished
        if not (run.exists and run.status == "finished"):
            return Outcome(job.name, "interrupted", signum=signum)
    except (*FAILURES, OSError) as error:
        return Outcome(job.name, "failed", in_one_line(error, limit=None))
    except Exception as error:  # an error of a library or a bug of klrl; so print the traceback
        traceback.print_exc()
        return Outcome(job.name, "failed", in_one_line(error))
    return Outcome(job.name, "finished", signum=signum)


def _run(job: Job) -> int | None:
    """Run or resume a job; return a signal that came too late to stop the run, else None."""
    import_for_good("klrl.train.loop", domain_of(job.config).module)
    from klrl.train.loop import start

    os.chdir(job.cwd)
    name_code(job.config)
    near = job.folder.is_relative_to(job.cwd)
    files = RunFolder(
        job.folder.relative_to(job.cwd) if near else job.folder,
        job.overrides,
        ["python", "-m", "klrl", *job.flags, *job.overrides],
    )
    with files.owned():
        if files.exists and recorded_identity(files) != job.identity:
            raise ConfigError(
                f"{job.folder}: now holds a different job; start the sweep again to give this "
                "job a folder of its own"
            )
        if files.exists and files.status == "finished":  # another process has finished it
            return None
        resume = files.exists and any(job.folder.glob("checkpoints/*/*/manifest.json"))
        if files.exists and not resume:
            forget_start(files)
        if job.host != platform.node():
            check_machine(job.config, parse(job.overrides), resumed=resume)
        return start(job.config, files, group=job.group, resume=resume)


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Append the stdout and stderr of this process and its children to a file."""
    path.parent.mkdir(exist_ok=True)
    kept = [os.dup(fd) for fd in (1, 2)]
    with to_append(path) as file:
        os.utime(file.fileno())  # shows that the job began, even if it prints nothing
        _flush()
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        _flush()
        for fd, before in zip((1, 2), kept, strict=True):
            os.dup2(before, fd)
            os.close(before)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
