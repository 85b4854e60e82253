"""A sweep from its words to its closing table."""

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
from klrl.config.overrides import SweepWords, expand, job_name, split_words, swept_keys
from klrl.runs.folder import new_folder
from klrl.sweep.check import check_jobs, sweep_settings
from klrl.sweep.jobs import Job, Outcome, Standing, make_jobs, stand
from klrl.sweep.launchers import launch
from klrl.sweep.ledger import Ledger, ended_line
from klrl.sweep.single import remove_unstarted
from klrl.sweep.stop import passed_on

FAILED = 1


def run_sweep(overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Run every job of a command line that is not finished yet.

    Args:
        overrides: the words after ``-m``.
        args: Hydra's flags.

    Returns:
        The exit code: 0, or 1 where a job failed.

    Raises:
        ConfigError: a word or a job is refused; nothing was written.
        Interrupted: a signal came; what ran wrote its checkpoint.
    """
    words = split_words(overrides)
    launcher, search = sweep_settings(words.own, args)
    return factory("search", search, SWEEP)(words, search, launcher, overrides, args)


def run_grid(
    words: SweepWords,
    config: SearchConfig,
    launcher: LauncherConfig,
    overrides: Sequence[str],
    args: argparse.Namespace,
) -> int:
    """``search=grid``: every combination of the values given; the exit code.

    Args:
        words: of the sweep and its jobs.
        config: of ``search``.
        launcher: of ``launcher``.
        overrides: all words, as they came.
        args: Hydra's flags.
    """
    checked = check_jobs(expand(words.job), args)
    check_launcher(launcher, checked)
    with sweep_folder(words) as folder:
        jobs = make_jobs(folder, named(words, checked))
        ledger = Ledger(folder, command_of(overrides, args), jobs)
        outcomes = run_jobs(folder, jobs, launcher, ledger)
        return close(folder, ledger, outcomes)


def named(words: SweepWords, checked: Sequence[Checked]) -> list[tuple[str, list[str], JobConfig]]:
    """Jobs with their folder's names."""
    swept = swept_keys(words.job)
    return [(job_name(job.words, swept), job.words, job.config) for job in checked]


def check_launcher(launcher: LauncherConfig, checked: Sequence[Checked]) -> None:
    """Refuse jobs that a launcher cannot serve.

    Raises:
        ConfigError: collection in further processes, from a process that shares the machine.
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
    """Run what is not finished; say so, and note each outcome at once.

    Raises:
        Interrupted: a signal came.
    """
    standing = stand(jobs)
    _note(ledger, standing)
    print(_opening(folder, standing, jobs), flush=True)
    todo = {job.name: job for job in standing.open}
    outcomes: list[Outcome] = []
    if launcher.name != "local":  # in processes of their own
        with passed_on(folder, lambda: list(todo.values())) as came:
            for outcome in launch(launcher, standing.open, folder):
                outcomes.append(outcome)
                ledger.take(outcome)
                ledger.write()
                if outcome.status != "waiting":
                    line = ended_line(outcome, todo[outcome.name], len(outcomes), len(todo))
                    print(line, flush=True)
        signum = came[0] if came else _signum(outcomes)
    else:
        signum = _one_by_one(launcher, standing.open, folder, ledger, outcomes)
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
    """In this process; the signal that stopped a job, if one did."""
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


def _note(ledger: Ledger, standing: Standing) -> None:
    states = {
        "finished": standing.finished,
        "running elsewhere": standing.elsewhere,
        "waiting": standing.open,
    }
    for state, jobs in states.items():
        for job in jobs:
            ledger.set(job, state)
    ledger.write()


def _opening(folder: Path, standing: Standing, jobs: Sequence[Job]) -> str:
    parts = [
        f"{len(found)} {text}"
        for found, text in (
            (standing.finished, "finished before"),
            (standing.elsewhere, "running in another process"),
            (standing.begun, "to go on with"),
            (standing.new, "to start"),
        )
        if found
    ]
    return f"sweep {folder}: {len(jobs)} job{'s' * (len(jobs) != 1)}, {', '.join(parts)}"


def close(folder: Path, ledger: Ledger, outcomes: Sequence[Outcome]) -> int:
    """The closing table; 1 where a job did not finish.

    Raises:
        ConfigError: every job was refused, and nothing was recorded.
    """
    refused = [o for o in outcomes if o.status == "refused"]
    if refused and not any(folder.glob("*/manifest.json")):
        raise ConfigError(str(refused[0].error))
    print(ledger.table())
    print(f"{ledger.counts()}; sweep folder: {folder}", flush=True)
    return FAILED if any(ledger.status(name) != "finished" for name in ledger.jobs) else 0


def command_of(overrides: Sequence[str], args: argparse.Namespace) -> list[str]:
    """A sweep's words, its flags before them."""
    given = {"--config-dir": args.config_dir, "--config-name": args.config_name}
    flags = [word for flag, value in given.items() if value for word in (flag, value)]
    return ["-m", *flags, *overrides]


@contextmanager
def sweep_folder(words: SweepWords) -> Iterator[Path]:
    """The sweep's folder, for this process alone; nothing is left of one where no job began.

    Raises:
        ConfigError: it cannot be written, another process runs the sweep, or ``hydra.sweep.dir``
            holds runs.
    """
    given = words.folder or (str(Path("outputs") / words.name) if words.name else None)
    setting = f"sweep={words.name}" if words.name else f"hydra.sweep.dir={given}"
    if words.folder and any(Path(words.folder).glob("**/manifest.json")):
        raise ConfigError(f"{setting}: holds a run already; give another, or use sweep=NAME")
    folder = Path(given) if given else None
    before = set(folder.iterdir()) if folder is not None and folder.is_dir() else None
    try:
        folder = folder or new_folder("_sweep")
        made = [p for p in (folder, *folder.parents) if not p.exists()]
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
            remove_unstarted(folder, before, made)
            raise
        finally:
            (folder / ".lock").unlink(missing_ok=True)
