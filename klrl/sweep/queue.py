"""``launcher=submitit``: runs jobs in SLURM's queue, or in submitit's local processes.

If SLURM warns a job of its time limit or of a preemption, the job writes a checkpoint, and requeues
itself under its id. submitit only submits jobs; klrl asks ``squeue`` for their states, since
submitit would need SLURM's accounting, which many clusters lack, and would limit the timeouts.
Jobs report their outcomes as JSON files. The sweep's folder may come from a stranger, so klrl
unpickles only jobs that the sweep's own process has just written into a new folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from uuid import uuid4

from klrl.base.errors import ConfigError, Interrupted
from klrl.base.files import make_folder, read_plain, replace_file, to_append
from klrl.base.interrupt import WARNINGS, stop_signals
from klrl.config import LauncherConfig, SubmititConfig
from klrl.runs.folder import RunFolder
from klrl.sweep import slurm
from klrl.sweep.jobs import Job, Notice, Outcome, Queued
from klrl.sweep.supervisor import Backend, Event, Lost, Supervisor, done, outcome_of, why_failed
from klrl.sweep.sweep_file import SweepFile
from klrl.sweep.worker import STOP_FILE, run_logged

#: The folder of submitit's files, below the sweep's folder.
SUBMISSIONS = ".submitit"
#: Seconds between polls for outcomes, between queries to SLURM, and between queries while stopping.
_POLL, _ASK, _ASK_STOPPING = 0.5, 10.0, 1.0


def uses_slurm(config: LauncherConfig) -> bool:
    """Return True if a launcher submits its jobs to SLURM."""
    if not isinstance(config, SubmititConfig):
        return False
    return config.cluster == "slurm" or (config.cluster == "auto" and slurm.here())


def check_queue(config: LauncherConfig) -> None:
    """Refuse SLURM if its commands are missing."""
    if uses_slurm(config) and not slurm.here():
        raise ConfigError(
            "launcher.cluster=slurm: sbatch, srun and squeue are not all on this machine; start "
            "the sweep where they are, or try it out with launcher.cluster=local"
        )


# ----------------------------------------------------------------------------- the sweep's side


def submitit(config: SubmititConfig, jobs: Sequence[Job], folder: Path) -> Iterator[Event]:
    """``launcher=submitit``: run jobs with submitit, in SLURM's queue or on this machine."""
    kind = _Slurm if uses_slurm(config) else _StandIn
    return Supervisor(kind(config, folder), folder).run(jobs)


class _StandIn(Backend):
    """The backend of ``launcher.cluster=local``: processes of submitit on this machine."""

    def __init__(self, config: SubmititConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._running: dict[str, tuple[Any, Job]] = {}  # name -> submitit's handle

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Sequence[Event]:
        executor = _executor(self._config, self._folder, "local")
        with executor.batch():
            self._running |= {job.name: (executor.submit(run_queued, job), job) for job in jobs}
        return ()

    def poll(self) -> Iterator[Event]:
        for name, (handle, job) in list(self._running.items()):
            if handle.done():
                del self._running[name]
                told = f"it ended without an outcome; see {handle.paths.stderr}"
                outcome = _read_outcome(handle.paths.folder, handle.job_id, job)
                yield outcome or Outcome(job.name, "failed", told)
        time.sleep(_POLL)

    def close(self) -> None:
        for handle, _ in self._running.values():
            handle.cancel(check=False)


class _Slurm(Backend):
    """The backend of SLURM's queue."""

    def __init__(self, config: SubmititConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._submissions = submissions(folder)
        self._waiting: dict[str, Job] = {}  # id -> job
        self._states: dict[str, str] = {}
        self._gone: set[str] = set()  # ids that the last call of squeue did not list
        self._left: dict[str, str] = {}  # name -> id, of jobs that SLURM ended too early
        self._asked = time.monotonic()
        self._stopping = self._interrupted = False

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Iterator[Event]:
        """Requeue lost jobs, watch jobs that are in the queue, and submit the others in arrays."""
        from submitit.core.utils import FailedJobError

        new = []
        for job in jobs:
            queue = self._left.pop(job.name, None)
            if queue is not None and (refused := slurm.requeue(queue)):
                yield Outcome(job.name, "interrupted", refused)
            elif queue := queue or job.queued:
                self._waiting[queue] = job
            else:
                new.append(job)
        if not new:
            return
        size = slurm.max_array_size()  # several arrays share ``array_parallelism``
        arrays = [new[start : start + size] for start in range(0, len(new), size)]
        together = max(self._config.array_parallelism // max(len(arrays), 1), 1)
        executor = _executor(self._config, self._folder, "slurm", together)
        for array in arrays:
            try:
                with redirect_stderr(StringIO()), executor.batch():  # submitit prints the refusal
                    handles = [executor.submit(run_queued, job) for job in array]
            except FailedJobError as error:
                raise ConfigError(
                    f"launcher=submitit: sbatch refuses the jobs: {slurm.refusal(error)}; correct "
                    "launcher.partition, launcher.timeout_min, ... or launcher.slurm"
                ) from error
            sent = {str(handle.job_id): job for handle, job in zip(handles, array, strict=True)}
            self._waiting |= sent
            yield Queued({job.name: queue for queue, job in sent.items()})

    def poll(self) -> Iterator[Event | Lost]:
        time.sleep(_POLL)
        there: dict[str, Path] = {}
        for folder in self._submissions.iterdir():
            with suppress(OSError):
                os.utime(folder)  # makes a network file system show new files
                there |= {path.name: folder for path in folder.iterdir()}
        for queue, job in list(self._waiting.items()):
            into = there.get(_outcome_file(queue))
            if into is not None and (outcome := _read_outcome(into, queue, job)) is not None:
                del self._waiting[queue]
                yield outcome
        if time.monotonic() - self._asked > (_ASK_STOPPING if self._stopping else _ASK):
            yield from self._ask()

    def _ask(self) -> Iterator[Event | Lost]:
        """Ask SLURM about the jobs without an outcome."""
        states = slurm.in_queue(self._submissions)
        self._asked = time.monotonic()
        if states is None:
            return  # SLURM's controller does not answer; running jobs do not need it
        if self._stopping:
            active = ("RUNNING", "COMPLETING")
            mine = {queue: states[queue] for queue in self._waiting.keys() & states.keys()}
            slurm.cancel([queue for queue, state in mine.items() if state not in active])
            if not self._interrupted:
                running = [queue for queue, state in mine.items() if state == "RUNNING"]
                slurm.cancel(running, "--signal=INT")  # stops with a checkpoint, as by Ctrl-C
            self._interrupted = True
        for queue, job in list(self._waiting.items()):
            # Wait until two queries lack the job: its outcome file may appear late.
            if queue not in states and queue in self._gone:
                del self._waiting[queue]
                yield self._without_outcome(queue, job)
            elif states.get(queue) == "PENDING" and self._states.get(queue) == "RUNNING":
                yield Notice(f"{job.name}: in the queue again, at {done(job)}")
        self._gone = self._waiting.keys() - states.keys()
        self._states = states

    def _without_outcome(self, queue: str, job: Job) -> Outcome | Lost:
        """Decide the outcome of a job that left the queue without reporting an outcome."""
        files = self._submissions.glob(f"*/{queue}_*")
        folder = next((path.parent for path in files), self._submissions)
        if (outcome := _read_outcome(folder, queue, job)) is not None:
            return outcome
        state = slurm.about(queue).get("JobState")
        if state in slurm.CUT_SHORT:
            self._left[job.name] = queue
            why = f"ended by SLURM ({state})"
            return Lost(job, why, _starts(folder, queue), state == "TIMEOUT", "interrupted")
        if state == "CANCELLED" or self._stopping:
            return outcome_of(job, None if self._stopping else _CANCELLED)
        told = f"SLURM says {state}" if state else "SLURM has no record of the reason"
        error = f"it left the queue without an outcome ({told})"
        outcome = outcome_of(job)
        return outcome if outcome.status == "finished" else Outcome(job.name, "failed", error)

    def stop(self) -> Sequence[Event]:
        self._stopping, self._asked = True, -math.inf  # so that the next poll asks squeue
        return ()

    def close(self) -> None:
        slurm.cancel(self._waiting)


_CANCELLED = "cancelled in SLURM's queue"


def _outcome_file(queue: str) -> str:
    return f"{queue}_outcome.json"


def _read_outcome(folder: Path, queue: str, job: Job) -> Outcome | None:
    """Read the outcome that a job wrote when it ended; None without a readable outcome."""
    try:
        told = json.loads(read_plain(folder / _outcome_file(queue)))
        error, seconds = told["error"], told["seconds"]
        seconds = None if seconds is None else float(seconds)
        return Outcome(job.name, str(told["status"]), error and str(error), seconds=seconds)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _executor(config: SubmititConfig, folder: Path, cluster: str, together: int = 1) -> Any:
    from submitit import AutoExecutor

    # Make a new folder for each submission: a job unpickles only files of this process.
    into = make_folder(submissions(folder)) / uuid4().hex
    into.mkdir(mode=0o700)
    executor = AutoExecutor(folder=into, cluster=cluster)
    given = {
        "name": f"klrl-{folder.name}",
        "timeout_min": config.timeout_min,
        "cpus_per_task": config.cpus_per_task,
        "gpus_per_node": config.gpus_per_node,
        "mem_gb": config.mem_gb,
        "slurm_array_parallelism": together,
        # Set it explicitly: clusters differ in whether jobs may be requeued by default.
        "slurm_additional_parameters": {"requeue": True, **config.slurm},
    }
    if config.partition is not None:
        given["slurm_partition"] = config.partition
    executor.update_parameters(**given)
    return executor


def submissions(folder: Path) -> Path:
    """Return the folder that contains a sweep's batch files."""
    return folder.absolute() / SUBMISSIONS


# ----------------------------------------------------------------------------- a second start


def settle(
    folder: Path, jobs: Sequence[Job], before: SweepFile, config: LauncherConfig
) -> tuple[Sequence[Job], list[str]]:
    """Adopt or cancel the jobs that an earlier process of the sweep left in SLURM's queue.

    Returns the jobs of this command, with ``queued`` set for adopted jobs, and lines for the user.
    ``before``: the earlier contents of ``sweep.json``. Only a launcher that uses SLURM adopts jobs.
    """
    if not submissions(folder).is_dir():
        return jobs, []
    known = any(entry.queue and entry.status != "finished" for entry in before.entries)
    if not slurm.here():
        unseen = "SLURM's queue may have jobs of this sweep, and cannot be seen from this machine"
        return jobs, [unseen] * known
    states = slurm.in_queue(submissions(folder))
    if states is None and known:
        raise ConfigError(
            f"{folder}: squeue fails, and SLURM's queue may have jobs of this sweep; wait until it "
            "answers"
        )
    return _settled(jobs, before, states or {}, uses_slurm(config))


def _settled(
    jobs: Sequence[Job], before: SweepFile, states: dict[str, str], adopting: bool
) -> tuple[list[Job], list[str]]:
    queued = {e.queue: e for e in before.entries if e.queue is not None and e.queue in states}
    unknown = states.keys() - queued.keys()
    unwanted = sorted(queue for queue in unknown if states[queue] != "COMPLETING")
    here = {job.identity: job.name for job in jobs}
    adopted: dict[str, str] = {}  # name -> id
    lines = []
    for queue, entry in queued.items():
        name = here.get(entry.key)
        if name is None:
            lines.append(f"{entry.name} is in SLURM's queue too ({queue}): left there")
        elif adopting and name not in adopted:
            adopted[name] = queue
        elif states[queue] == "PENDING":
            unwanted.append(queue)
    slurm.cancel(unwanted)
    if adopted:
        some = ", ".join(list(adopted.values())[:5]) + ", ..." * (len(adopted) > 5)
        lines.append(f"adopted from SLURM's queue: {len(adopted)} ({some})")
    if unwanted:
        lines.append(f"cancelled in SLURM's queue: {len(unwanted)} of an earlier start")
    return [dataclasses.replace(job, queued=adopted.get(job.name)) for job in jobs], lines


# ------------------------------------------------------------------------------- the job's side


def run_queued(job: Job) -> None:
    """Run or resume a job in the process that submitit started.

    Writes the job's outcome, unless the queue will restart the job.
    """
    from submitit import JobEnvironment

    environment = JobEnvironment()
    folder, queue = environment.paths.folder, environment.job_id
    outcome = _run(job, folder, queue, on_slurm=environment.name() == "slurm")
    replace_file(folder / _outcome_file(queue), json.dumps(dataclasses.asdict(outcome)))


def _run(job: Job, folder: Path, queue: str, *, on_slurm: bool) -> Outcome:
    starts = [*_starts(folder, queue), RunFolder(job.folder).checkpointed]
    replace_file(folder / f"{queue}_starts.json", json.dumps(starts))
    outcome = _run_warned(job)
    person = outcome.signum in (None, signal.SIGINT) or (job.folder.parent / STOP_FILE).exists()
    if outcome.status != "interrupted" or person:
        return outcome
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    why = slurm.why_stopped(queue, restarts) if on_slurm else "warned"
    error = _CANCELLED if why == "cancelled" else None
    if why == "warned":
        error = why_failed(job, starts, outcome.signum in WARNINGS)
        if error is None and on_slurm and (refused := slurm.requeue(queue)):
            error = f"SLURM refused to requeue it: {refused}"
    if error:
        return dataclasses.replace(outcome, error=error, signum=None)
    with to_append(job.log) as log:
        name = signal.Signals(outcome.signum or 0).name
        log.write(f"in the queue again after {name}, at {done(job)}\n".encode())
    from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

    sys.exit(255 if on_slurm else LOCAL_REQUEUE_RETURN_CODE)


def _run_warned(job: Job) -> Outcome:
    """Run a job so that a signal at any time ends it with a checkpoint."""
    # submitit's own handler would requeue the job at once, without a checkpoint.
    for each in (*WARNINGS, signal.SIGCONT):
        signal.signal(each, signal.SIG_DFL)
    try:
        with stop_signals(_stopped):
            outcome = run_logged(job)
    except Interrupted as stop:  # the signal came before the run began, or after it ended
        finished = outcome_of(job).status == "finished"
        outcome = Outcome(job.name, "finished" if finished else "interrupted", signum=stop.signum)
    # Ignore SLURM's signals from now on: they would also end scontrol, which requeues the job.
    for each in (*WARNINGS, signal.SIGTERM, signal.SIGCONT, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    return outcome


def _stopped(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _starts(folder: Path, queue: str) -> list[int]:
    """Return, for each start of a job, the frames from which it continued."""
    try:
        return [int(each) for each in json.loads(read_plain(folder / f"{queue}_starts.json"))]
    except (OSError, ValueError, TypeError):
        return []
