"""Runs a sweep, from its command line to its closing table."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from klrl.base.errors import ConfigError, Interrupted, OwnerError, WorkerError
from klrl.base.files import to_append
from klrl.base.interrupt import stop_signals, stops_at_once
from klrl.base.programs import safe_children
from klrl.base.screen import show
from klrl.base.text import escaped, warn
from klrl.config import (
    GROUPS,
    SWEEP,
    SWEEP_GROUPS,
    JobConfig,
    LauncherConfig,
    SearchConfig,
    factory,
)
from klrl.config.checks import plain, to_settings
from klrl.config.compose import Checked, Composer
from klrl.config.given import Given
from klrl.config.overrides import Separated, expand, flags, job_name, separate, swept_keys
from klrl.runs.machine import check_machine, check_package
from klrl.runs.owner import OwnedElsewhere, living_owner, owning, read_owner
from klrl.sweep.cluster import check_cluster
from klrl.sweep.jobs import (
    ELSEWHERE,
    FINISHED,
    NEW,
    OPEN,
    Job,
    Notice,
    Outcome,
    Queued,
    by_status,
    counted,
    make_jobs,
)
from klrl.sweep.ledger import Ledger, ended_line
from klrl.sweep.queue import check_queue, settle, uses_slurm
from klrl.sweep.supervisor import Event
from klrl.sweep.worker import STOP_FILE
from klrl.train.start import OutputFolder


def run_sweep(args: argparse.Namespace) -> int:
    """Run every unfinished job of a command line; return 0 if all jobs are finished, else 1.

    Raises:
        Interrupted: a signal stopped the sweep.
    """
    sweep = separate(args.overrides, multirun=True)
    launcher, search = sweep_settings(sweep.own, args)
    check_queue(launcher)
    check_cluster(launcher)
    return factory("search", search, SWEEP)(sweep, search, launcher, args)


def run_grid(
    sweep: Separated, config: SearchConfig, launcher: LauncherConfig, args: argparse.Namespace
) -> int:
    """``search=grid``: run every combination of the given values; return the exit code."""
    checked = check_jobs(expand(sweep.job), args)
    with sweep_folder(sweep) as folder:
        names = named(swept_keys(sweep.job), checked)
        jobs = make_jobs(folder, names, flags(args.config_dir))
        ledger = Ledger(folder, command_of(args))
        outcomes = run_jobs(folder, jobs, launcher, ledger)
        return close(folder, ledger, outcomes)


def named(
    swept: Sequence[str], checked: Sequence[Checked]
) -> list[tuple[str, list[Given], JobConfig]]:
    """Return name, overrides and settings of each job; the name contains the swept keys."""
    return [(job_name(job.overrides, swept), job.overrides, job.config) for job in checked]


def run_jobs(
    folder: Path, jobs: Sequence[Job], launcher: LauncherConfig, ledger: Ledger
) -> list[Outcome]:
    """Run the unfinished jobs; print and record each outcome at once.

    Raises:
        ConfigError: the launcher's queue refuses the jobs, or does not answer.
        Interrupted: a signal stopped the jobs.
        OwnerError: the sweep's folder was moved or deleted.
        WorkerError: the launcher's cluster cannot be joined, or has no machine left.
    """
    todo = _opened(folder, jobs, launcher, ledger)
    outcomes: list[Outcome] = []
    local = launcher.name == "local"
    passing: AbstractContextManager[list[int]] = nullcontext([])
    if not local:  # a local job runs in this process, and handles signals itself
        passing = passed_on(folder, todo, uses_slurm(launcher))
    try:
        with passing as signals, nullcontext() if local else safe_children():
            for event in factory("launcher", launcher, SWEEP)(launcher, todo, folder):
                _take(event, ledger, outcomes, len(todo), local=local)
                if local and isinstance(event, Outcome) and event.signum is not None:
                    signals.append(event.signum)
                    break
    except WorkerError:
        ledger.print_table("stopped: ")
        raise
    except FileNotFoundError as error:
        if folder.is_dir():
            raise
        raise OwnerError(
            f"{folder}: was moved or deleted during the sweep; start the sweep where it is now, by "
            "sweep=NAME"
        ) from error
    if signals:
        ledger.print_table("stopped: ")
        raise Interrupted(signals[0])
    return outcomes


def _take(
    event: Event, ledger: Ledger, outcomes: list[Outcome], total: int, *, local: bool
) -> None:
    """Record and print an event of the launcher."""
    if isinstance(event, Notice):
        show(escaped(event.line), style="bold")
    elif isinstance(event, Queued):
        ledger.queued(event.ids)
        arrays = dict.fromkeys(each.partition("_")[0] for each in event.ids.values())
        print(
            "in SLURM's queue, even after this process ends: "
            f"scancel {' '.join(arrays)} cancels them",
            flush=True,
        )
    else:
        outcomes.append(event)
        ledger.take(event)
        if not local and event.status != "waiting":
            job = ledger.jobs[event.name]
            print(escaped(ended_line(event, job, len(outcomes), total)), flush=True)
        elif local and event.error:
            warn(f"klrl: {event.status}: {event.error}")


def _opened(
    folder: Path, jobs: Sequence[Job], launcher: LauncherConfig, ledger: Ledger
) -> list[Job]:
    """Record all jobs, print the sweep's first lines, and return the jobs to run."""
    jobs, notes = settle(folder, jobs, ledger.before, launcher)
    status = by_status(jobs)
    todo = [job for each in OPEN for job in status[each]]
    recorded = {"finished": status[FINISHED], "running elsewhere": status[ELSEWHERE]}
    for name, group in {**recorded, "waiting": todo}.items():
        for job in group:
            ledger.set(job, name)
    ledger.write()
    print(f"sweep {folder}: {counted(status)}", flush=True)
    owners = [(job.name, read_owner(job.folder)) for job in status[ELSEWHERE]]
    notes += [*ledger.notes, *(job.note for job in status[NEW] if job.note)]
    ends = "ends it, with a checkpoint"
    notes += [f"{name}: kill {of.pid} on {of.host} {ends}" for name, of in owners if of]
    for line in [*notes[:10], *[f"... and {len(notes) - 10} more"] * (len(notes) > 10)]:
        print(escaped(line), flush=True)
    return todo


def close(folder: Path, ledger: Ledger, outcomes: Sequence[Outcome]) -> int:
    """Print the closing table; return 0 if all jobs are finished, else 1."""
    refused = [o for o in outcomes if o.status == "refused"]
    if refused and not any(folder.glob("*/manifest.json")):  # no job began
        raise ConfigError(str(refused[0].error))
    ledger.print_table()
    return 1 if any(ledger.status(name) != "finished" for name in ledger.jobs) else 0


def command_of(args: argparse.Namespace) -> list[str]:
    """Return the arguments of a sweep's command after ``klrl``: flags, then overrides."""
    return ["-m", *flags(args.config_dir), *args.overrides]


@contextmanager
def sweep_folder(sweep: Separated) -> Iterator[Path]:
    """Make and own the sweep's folder for the context; after an error, remove it if no job began.

    Raises:
        OwnedElsewhere: another process runs the sweep.
    """
    setting = f"sweep={sweep.name}" if sweep.name else f"hydra.sweep.dir={sweep.path}"
    folder = OutputFolder(sweep.path, setting, "_sweep")
    if sweep.folder and folder.holds_run:
        raise ConfigError(f"{setting}: already has a run; give another folder, or use sweep=NAME")
    try:
        folder.make()
        with owning(folder.path, setting):
            yield folder.path
    except OwnedElsewhere:
        raise  # another process owns the files in the folder
    except (ConfigError, KeyboardInterrupt, Interrupted):
        folder.remove_unstarted()
        raise


@contextmanager
def passed_on(folder: Path, jobs: Sequence[Job], by_queue: bool = False) -> Iterator[list[int]]:
    """In the context, a signal asks running jobs to stop; a second SIGINT or SIGTERM stops klrl.

    Yields the signals received so far. ``by_queue``: the jobs are in SLURM's queue, whose backend
    stops them.
    """
    received: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        if any(stops_at_once(signum, before) for before in received):
            raise Interrupted(signum)
        received.append(signum)
        if len(received) > 1:  # the first signal was already passed on to the jobs
            return
        with suppress(OSError):  # even on a full disk, the jobs must be stopped
            to_append(folder / STOP_FILE).close()
        pids = [] if by_queue else [pid for job in jobs if (pid := _pid(job)) is not None]
        which = "the jobs in the queue" if by_queue else f"{len(pids)} job{'s' * (len(pids) != 1)}"
        warn("")
        warn(
            f"stopping {which} after their iteration, with checkpoints; a second "
            "Ctrl-C or SIGTERM stops at once"
        )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    (folder / STOP_FILE).unlink(missing_ok=True)  # a killed sweep may have left it
    try:
        with stop_signals(ask):
            yield received
    finally:
        (folder / STOP_FILE).unlink(missing_ok=True)


def _pid(job: Job) -> int | None:
    """Return the process id of a job that runs on this machine, outside this process."""
    owner = living_owner(job.folder)
    if owner is None or (owner.host, owner.pid) == (platform.node(), os.getpid()):
        return None
    return owner.pid if owner.host == platform.node() else None


def check_jobs(jobs: Sequence[list[Given]], args: argparse.Namespace) -> list[Checked]:
    """Check every job before the first job runs; check the machine once per distinct ``parts``."""
    composer = Composer(args.config_dir)
    checked = [Checked(job, composer.job_config(job)) for job in jobs]
    seen = set()
    for each in checked:
        parts = ("env", "actor", "collector", "device", "reference", "logger")
        machine = repr([getattr(each.config, part) for part in parts])
        if machine not in seen:
            check_machine(each.config, each.overrides)
        seen.add(machine)
    for group in GROUPS:
        of = {getattr(each.config, group).name: each.config for each in checked}
        # If all jobs have the same choice, the first job to start checks it.
        for config in of.values() if len(of) > 1 else ():
            factory(group, getattr(config, group), config.domain)
    return checked


def sweep_settings(
    own: Sequence[Given], args: argparse.Namespace
) -> tuple[LauncherConfig, SearchConfig]:
    """Compose the settings of the launcher and the search; refuse a missing package."""
    for each in own:
        if each.key in SWEEP_GROUPS and "," in each.value:
            raise ConfigError(f"{each}: a sweep has one {each.key}; give one")
    cfg = Composer(args.config_dir, "sweep").composed(own)
    parts: dict[str, Any] = to_settings(plain(cfg), SWEEP_GROUPS)
    for group, config in parts.items():
        check_package(group, config.name)
    return parts["launcher"], parts["search"]
