"""A sweep from its command line to its closing table."""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from klrl.base.errors import ConfigError, Interrupted
from klrl.config import SWEEP, JobConfig, LauncherConfig, SearchConfig, factory
from klrl.config.compose import Checked
from klrl.config.overrides import SweepOverrides, expand, job_name, split_overrides, swept_keys
from klrl.runs.folder import new_folder
from klrl.sweep.check import check_jobs, sweep_settings
from klrl.sweep.jobs import Job, JobStatus, Outcome, make_jobs, status_of
from klrl.sweep.launchers import launch
from klrl.sweep.ledger import Ledger, ended_line
from klrl.sweep.single import remove_unstarted
from klrl.sweep.stop import passed_on

FAILED = 1


def run_sweep(overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Run every job of a command line that is not finished yet.

    Args:
        overrides: those after ``-m``.
        args: Hydra's flags.

    Returns:
        The exit code: 0, or 1 where a job failed.

    Raises:
        ConfigError: an override or a job is refused; nothing was written.
        Interrupted: a signal came; the running jobs wrote their checkpoints.
    """
    sweep = split_overrides(overrides)
    launcher, search = sweep_settings(sweep.own, args)
    return factory("search", search, SWEEP)(sweep, search, launcher, overrides, args)


def run_grid(
    sweep: SweepOverrides,
    config: SearchConfig,
    launcher: LauncherConfig,
    overrides: Sequence[str],
    args: argparse.Namespace,
) -> int:
    """``search=grid``: every combination of the values given; the exit code.

    Args:
        sweep: the overrides of the sweep and of its jobs.
        config: the settings of ``search``.
        launcher: the settings of ``launcher``.
        overrides: all of them, as given.
        args: Hydra's flags.
    """
    checked = check_jobs(expand(sweep.job), args)
    check_launcher(launcher, checked)
    with sweep_folder(sweep) as folder:
        jobs = make_jobs(folder, named(sweep, checked))
        ledger = Ledger(folder, command_of(overrides, args), jobs)
        outcomes = run_jobs(folder, jobs, launcher, ledger)
        return close(folder, ledger, outcomes)


def named(
    sweep: SweepOverrides, checked: Sequence[Checked]
) -> list[tuple[str, list[str], JobConfig]]:
    """The folder name, overrides and settings of each job."""
    swept = swept_keys(sweep.job)
    return [(job_name(job.overrides, swept), job.overrides, job.config) for job in checked]


def check_launcher(launcher: LauncherConfig, checked: Sequence[Checked]) -> None:
    """Refuse jobs that a launcher cannot run.

    Raises:
        ConfigError: a job collects in more processes, although jobs already share the cores.
    """
    if launcher.name in ("joblib", "ray"):
        for _, config in checked:
            if config.collector.name == "ray":
                raise ConfigError(
                    f"launcher={launcher.name}: its jobs share the cores, and collector=ray would "
                    "start more processes in each; use launcher=local, or collector=vector"
                )


def run_jobs(
    folder: Path, jobs: Sequence[Job], launcher: LauncherConfig, ledger: Ledger
) -> list[Outcome]:
    """Run the jobs that are not finished; print and record each outcome as it comes.

    Raises:
        Interrupted: a signal came.
    """
    status = status_of(jobs)
    _record(ledger, status)
    print(_opening(folder, status, jobs), flush=True)
    todo = {job.name: job for job in status.open}
    outcomes: list[Outcome] = []
    if launcher.name != "local":  # in processes of their own
        with passed_on(folder, lambda: list(todo.values())) as signals:
            for outcome in launch(launcher, status.open, folder):
                outcomes.append(outcome)
                ledger.take(outcome)
                ledger.write()
                if outcome.status != "waiting":
                    line = ended_line(outcome, todo[outcome.name], len(outcomes), len(todo))
                    print(line, flush=True)
        signum = signals[0] if signals else _signum(outcomes)
    else:
        signum = _one_by_one(launcher, status.open, folder, ledger, outcomes)
    if signum is not None:
        print(ledger.table())
        print(f"stopped: {ledger.counts()}; sweep folder: {folder}", flush=True)
        raise Interrupted(signum)
    return outcomes


def _one_by_one(
    launcher: LauncherConfig,
    jobs: Sequence[Job],
    folder: Path,
    ledger: Ledger,
    outcomes: list[Outcome],
) -> int | None:
    """Run jobs in this process; the signal that stopped one, if any."""
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.name}", flush=True)
        for outcome in launch(launcher, [job], folder):
            outcomes.append(outcome)
            ledger.take(outcome)
            ledger.write()
            if outcome.error:
                print(f"klrl: {outcome.status}: {outcome.error}", file=sys.stderr, flush=True)
        if outcomes[-1].signum is not None:
            return outcomes[-1].signum
    return None


def _signum(outcomes: Sequence[Outcome]) -> int | None:
    return next((o.signum for o in outcomes if o.signum is not None), None)


def _record(ledger: Ledger, status: JobStatus) -> None:
    by_name = {
        "finished": status.finished,
        "running elsewhere": status.elsewhere,
        "waiting": status.open,
    }
    for name, jobs in by_name.items():
        for job in jobs:
            ledger.set(job, name)
    ledger.write()


def _opening(folder: Path, status: JobStatus, jobs: Sequence[Job]) -> str:
    parts = [
        f"{len(group)} {text}"
        for group, text in (
            (status.finished, "finished before"),
            (status.elsewhere, "running in another process"),
            (status.begun, "to resume"),
            (status.new, "to start"),
        )
        if group
    ]
    return f"sweep {folder}: {len(jobs)} job{'s' * (len(jobs) != 1)}, {', '.join(parts)}"


def close(folder: Path, ledger: Ledger, outcomes: Sequence[Outcome]) -> int:
    """Print the closing table; returns 1 where a job did not finish.

    Raises:
        ConfigError: a job was refused and no job recorded anything.
    """
    refused = [o for o in outcomes if o.status == "refused"]
    if refused and not any(folder.glob("*/manifest.json")):
        raise ConfigError(str(refused[0].error))
    print(ledger.table())
    print(f"{ledger.counts()}; sweep folder: {folder}", flush=True)
    return FAILED if any(ledger.status(name) != "finished" for name in ledger.jobs) else 0


def command_of(overrides: Sequence[str], args: argparse.Namespace) -> list[str]:
    """A sweep's flags, then its overrides."""
    given = {"--config-dir": args.config_dir, "--config-name": args.config_name}
    flags = [part for flag, value in given.items() if value for part in (flag, value)]
    return ["-m", *flags, *overrides]


@contextmanager
def sweep_folder(sweep: SweepOverrides) -> Iterator[Path]:
    """The sweep's folder, locked for this process; removed again if no job began.

    Raises:
        ConfigError: it cannot be written, another process runs the sweep, or ``hydra.sweep.dir``
            holds runs.
    """
    given = sweep.folder or (str(Path("outputs") / sweep.name) if sweep.name else None)
    setting = f"sweep={sweep.name}" if sweep.name else f"hydra.sweep.dir={given}"
    folder = Path(given) if given else None
    try:
        if sweep.folder and any(Path(sweep.folder).glob("**/manifest.json")):
            raise ConfigError(f"{setting}: holds a run already; give another, or use sweep=NAME")
        before = set(folder.iterdir()) if folder is not None and folder.is_dir() else None
        folder = folder or new_folder("_sweep")
        new = [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be written: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{setting}: another process runs it; wait or stop it") from error
        try:
            yield folder
        except (ConfigError, KeyboardInterrupt, Interrupted):
            remove_unstarted(folder, before, new)
            raise
        finally:
            (folder / ".lock").unlink(missing_ok=True)
