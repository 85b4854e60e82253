"""``launcher=submitit``: jobs in SLURM's queue, or in submitit's stand-in on this machine.

A job that is warned (a time limit, a preemption) writes its checkpoint, queues itself again under
its id, and goes on from there, as long as its frames advance. submitit sends the jobs off; what
becomes of them is asked of ``squeue``, since submitit asks the accounting, which many clusters
lack, and counts time limits. A job brings its outcome back as JSON: the sweep's folder may be from
elsewhere, so nothing in it is unpickled, except by a job what was put for it into a new folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from uuid import uuid4

from klrl.base.errors import ConfigError, Interrupted
from klrl.base.files import make_folder, replace_file, to_append
from klrl.base.interrupt import WARNINGS, stop_signals
from klrl.config import LauncherConfig, SubmititConfig
from klrl.runs.folder import RunFolder
from klrl.sweep import slurm
from klrl.sweep.jobs import Job, Outcome, Queued, done, in_vain, stuck
from klrl.sweep.sweep_file import SweepFile
from klrl.sweep.worker import STOP_FILE, run_logged

#: Where submitit keeps its files, below the sweep's folder.
SUBMISSIONS = ".submitit"
#: Seconds between looks for outcomes, and between questions to SLURM: it serves many.
_POLL, _ASK, _ASK_STOPPING = 0.5, 10.0, 1.0


def uses_slurm(config: LauncherConfig) -> bool:
    """Whether the jobs of a launcher go to SLURM."""
    if not isinstance(config, SubmititConfig):
        return False
    return config.cluster == "slurm" or (config.cluster == "auto" and slurm.here())


def check_queue(config: LauncherConfig) -> None:
    """Refuse SLURM where there is none.

    Raises:
        ConfigError: its commands are missing.
    """
    if uses_slurm(config) and not slurm.here():
        raise ConfigError(
            "launcher.cluster=slurm: sbatch, srun and squeue are not all on this machine; start "
            "the sweep where they are, or try it out with launcher.cluster=local"
        )


# ----------------------------------------------------------------------------- the sweep's side


def submitit(
    config: SubmititConfig, jobs: Sequence[Job], folder: Path
) -> Iterator[Outcome | Queued]:
    """Run jobs with submitit; see :mod:`klrl.sweep.launchers`."""
    if uses_slurm(config):
        yield from _Queue(config, folder).run(jobs)
    else:
        yield from _on_this_machine(config, jobs, folder)


def _on_this_machine(
    config: SubmititConfig, jobs: Sequence[Job], folder: Path
) -> Iterator[Outcome]:
    """``launcher.cluster=local``: submitit's stand-in for a queue."""
    executor = _executor(config, folder, "local")
    with executor.batch():
        running = {job.name: (executor.submit(InQueue(), job), job) for job in jobs}
    try:
        while running:
            for name, (handle, job) in list(running.items()):
                if handle.done():
                    del running[name]
                    yield _result_of(handle, job)
            time.sleep(_POLL)
    finally:
        for handle, _ in running.values():
            handle.cancel(check=False)


def _result_of(handle: Any, job: Job) -> Outcome:
    outcome = _read_outcome(handle.paths.folder / _outcome_file(handle.job_id), job)
    return outcome or Outcome(
        job.name, "failed", f"it ended without an outcome; see {handle.paths.stderr}"
    )


class _Queue:
    """The jobs of a sweep in SLURM's queue.

    Args:
        config: the settings of the launcher.
        folder: the sweep's.
    """

    def __init__(self, config: SubmititConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._submissions = submissions(folder)
        self._waiting: dict[str, Job] = {}  # by id
        self._states: dict[str, str] = {}
        self._gone: set[str] = set()  # that squeue did not know the last time
        self._asked = time.monotonic()
        self._stopping = False

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome | Queued]:
        """Send jobs off, those excepted that are in the queue already, and wait for all.

        Raises:
            ConfigError: sbatch refuses them; none is left in the queue.
        """
        self._waiting = {job.queued: job for job in jobs if job.queued}
        try:
            yield from self._submit([job for job in jobs if not job.queued])
            while self._waiting:
                yield from self._outcomes()
                stop = (self._folder / STOP_FILE).exists()
                every = _ASK_STOPPING if self._stopping else _ASK
                if time.monotonic() - self._asked > every or (stop and not self._stopping):
                    yield from self._ask(stop)
                time.sleep(_POLL)
        finally:
            slurm.cancel(self._waiting)

    def _submit(self, jobs: Sequence[Job]) -> Iterator[Queued]:
        """Send jobs off in arrays that SLURM takes, which share ``array_parallelism``."""
        from submitit.core.utils import FailedJobError

        size = slurm.max_array_size()
        arrays = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        together = max(self._config.array_parallelism // max(len(arrays), 1), 1)
        executor = _executor(self._config, self._folder, "slurm", together)
        for array in arrays:
            try:
                with redirect_stderr(StringIO()), executor.batch():  # submitit prints the refusal
                    handles = [executor.submit(InQueue(), job) for job in array]
            except FailedJobError as error:
                raise ConfigError(
                    f"launcher=submitit: sbatch refuses the jobs: {slurm.refusal(error)}; correct "
                    "launcher.partition, launcher.timeout_min, ... or launcher.slurm"
                ) from error
            sent = {str(handle.job_id): job for handle, job in zip(handles, array, strict=True)}
            self._waiting |= sent
            yield Queued({job.name: queue for queue, job in sent.items()})

    def _outcomes(self) -> Iterator[Outcome]:
        """The outcomes that jobs brought back."""
        there: dict[str, Path] = {}
        for folder in self._submissions.iterdir():
            with suppress(OSError):  # a file system of many machines shows what is new when asked
                os.utime(folder)
                there |= {path.name: path for path in folder.iterdir()}
        for queue, job in list(self._waiting.items()):
            path = there.get(_outcome_file(queue))
            outcome = None if path is None else _read_outcome(path, job)
            if outcome is not None:
                del self._waiting[queue]
                # A signal that ended one job is not one to the sweep.
                yield dataclasses.replace(outcome, signum=None)

    def _folder_of(self, queue: str) -> Path:
        """The folder into which a job was sent."""
        files = self._submissions.glob(f"*/{queue}_*")
        return next((path.parent for path in files), self._submissions)

    def _ask(self, stop: bool) -> Iterator[Outcome | Queued]:
        """Ask SLURM for the jobs without an outcome, and see to those that it ended."""
        states = slurm.in_queue(self._submissions)
        self._asked = time.monotonic()
        if states is None:
            return  # its controller is away; the jobs need it as little as the sweep does
        if stop:
            self._stop(states)
        for queue, job in list(self._waiting.items()):
            if queue not in states and queue in self._gone:  # its outcome may come a little later
                yield from self._left(queue, job)
            elif states.get(queue) == "PENDING" and self._states.get(queue) == "RUNNING":
                yield Queued({job.name: queue}, f"in the queue again, at {done(job)}")
        self._gone = self._waiting.keys() - states.keys()
        self._states = states

    def _left(self, queue: str, job: Job) -> Iterator[Outcome | Queued]:
        """See to a job that left the queue without an outcome."""
        folder = self._folder_of(queue)
        if (outcome := _read_outcome(folder / _outcome_file(queue), job)) is None:
            state = slurm.state_of(queue)
            if state in slurm.CUT_SHORT and not self._stopping:
                error = idle(folder, queue, job, state == "TIMEOUT")
                error = error or slurm.requeue(queue)
                if error is None:
                    again = f"ended by SLURM ({state}), in the queue again, at {done(job)}"
                    yield Queued({job.name: queue}, again)
                    return
                outcome = Outcome(job.name, "interrupted", error)
            else:
                outcome = self._without_a_word(job, state)
        del self._waiting[queue]
        yield dataclasses.replace(outcome, signum=None)

    def _without_a_word(self, job: Job, state: str | None) -> Outcome:
        run = RunFolder(job.folder)
        if run.exists and run.status == "finished":
            return Outcome(job.name, "finished")
        if state == "CANCELLED" or self._stopping:
            begun = "interrupted" if run.exists else "waiting"
            return Outcome(job.name, begun, None if self._stopping else _CANCELLED)
        told = f"SLURM says {state}" if state else "SLURM has forgotten why"
        return Outcome(job.name, "failed", f"it left the queue without an outcome ({told})")

    def _stop(self, states: dict[str, str]) -> None:
        """Ask the running jobs to stop, once; take the others out of the queue."""
        mine = {queue: states[queue] for queue in self._waiting.keys() & states.keys()}
        active = ("RUNNING", "COMPLETING")
        slurm.cancel([queue for queue, state in mine.items() if state not in active])
        if not self._stopping:
            slurm.interrupt([queue for queue, state in mine.items() if state == "RUNNING"])
        self._stopping = True


_CANCELLED = "cancelled in SLURM's queue"


def _outcome_file(queue: str) -> str:
    """The file in which a job brings its outcome."""
    return f"{queue}_outcome.json"


def _read_outcome(path: Path, job: Job) -> Outcome | None:
    """What a job wrote when it ended; None where it did not."""
    try:
        told = json.loads(path.read_bytes())
        error, signum = told["error"], told["signum"]
        return Outcome(
            job.name,
            str(told["status"]),
            None if error is None else str(error),
            None if signum is None else int(signum),
            float(told["seconds"]),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _executor(config: SubmititConfig, folder: Path, cluster: str, together: int = 1) -> Any:
    from submitit import AutoExecutor

    # Queueing a job again must not depend on what a cluster takes for granted.
    more = {"requeue": True, **dict(config.slurm)}
    given = {
        "name": f"klrl-{folder.name}",
        "timeout_min": config.timeout_min,
        "cpus_per_task": config.cpus_per_task,
        "gpus_per_node": config.gpus_per_node,
        "mem_gb": config.mem_gb,
        "slurm_partition": config.partition,
        "slurm_array_parallelism": together,
        "slurm_additional_parameters": more,
    }
    # A new folder for each start: what a job unpickles there was put there for it.
    into = make_folder(submissions(folder)) / uuid4().hex
    into.mkdir(mode=0o700)
    executor = AutoExecutor(folder=into, cluster=cluster)
    executor.update_parameters(**{key: value for key, value in given.items() if value is not None})
    return executor


def submissions(folder: Path) -> Path:
    """Below which the batch files of a sweep lie."""
    return folder.absolute() / SUBMISSIONS


# ----------------------------------------------------------------------------- a second start


def settle(
    folder: Path, jobs: Sequence[Job], before: SweepFile, config: LauncherConfig
) -> tuple[list[Job], list[str]]:
    """Adopt or cancel what an earlier process of the sweep left in SLURM's queue.

    Args:
        folder: the sweep's.
        jobs: of this command.
        before: ``sweep.json`` as it was.
        config: the launcher; one that does not use the queue adopts nothing.

    Returns:
        The jobs, those that are in the queue with its id; lines that tell.

    Raises:
        ConfigError: SLURM does not answer.
    """
    if not submissions(folder).is_dir():
        return list(jobs), []
    known = any(entry.queue and entry.status != "finished" for entry in before.entries)
    if not slurm.here():
        unseen = "SLURM's queue may have jobs of this sweep, and cannot be seen from this machine"
        return list(jobs), [unseen] * known
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
    known = {entry.queue: entry for entry in before.entries if entry.queue in states}
    here = {job.identity: job for job in jobs}
    adopted: dict[str, str] = {}  # name -> id
    unknown = states.keys() - known.keys()
    unwanted = sorted(queue for queue in unknown if states[queue] != "COMPLETING")
    lines = []
    for queue, entry in known.items():
        job = here.get(entry.key)
        if job is None:
            lines.append(f"{entry.name} is in SLURM's queue too ({queue}): left there")
        elif adopting and job.name not in adopted:
            adopted[job.name] = str(queue)
        elif states[str(queue)] == "PENDING":
            unwanted.append(str(queue))
    slurm.cancel(unwanted)
    if adopted:
        some = ", ".join(list(adopted.values())[:5]) + ", ..." * (len(adopted) > 5)
        lines.append(f"adopted from SLURM's queue: {len(adopted)} ({some})")
    if unwanted:
        lines.append(f"cancelled in SLURM's queue: {len(unwanted)} of an earlier start")
    with_ids = [dataclasses.replace(job, queued=adopted.get(job.name)) for job in jobs]
    return with_ids, lines


# ------------------------------------------------------------------------------- the job's side


class InQueue:
    """Runs a job in the process that the queue started, for submitit."""

    def __call__(self, job: Job) -> None:
        """Run or resume a job, and write its outcome, unless the queue is to start it again."""
        from submitit import JobEnvironment

        environment = JobEnvironment()
        folder, queue = environment.paths.folder, environment.job_id
        outcome = self._run(job, folder, queue, on_slurm=environment.name() == "slurm")
        replace_file(folder / _outcome_file(queue), json.dumps(dataclasses.asdict(outcome)))

    def _run(self, job: Job, folder: Path, queue: str, *, on_slurm: bool) -> Outcome:
        _note_start(folder, queue, RunFolder(job.folder).checkpointed)
        outcome = _run_warned(job)
        person = outcome.signum in (None, signal.SIGINT) or (job.folder.parent / STOP_FILE).exists()
        if outcome.status != "interrupted" or person:
            return outcome
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        why = slurm.why_stopped(queue, restarts) if on_slurm else "warned"
        error = _CANCELLED if why == "cancelled" else None
        if why == "warned":
            at_limit = outcome.signum in WARNINGS
            error = idle(folder, queue, job, at_limit)
            if error is None and on_slurm and (refused := slurm.requeue(queue)):
                error = f"it could not queue itself again: {refused}"
        if error:
            return dataclasses.replace(outcome, error=error, signum=None)
        with to_append(job.log) as log:
            name = signal.Signals(outcome.signum or 0).name
            log.write(f"in the queue again after {name}, at {done(job)}\n".encode())
        sys.exit(255 if on_slurm else _again_here())


def _run_warned(job: Job) -> Outcome:
    """Run a job so that a signal, whenever it comes, ends it in good order.

    submitit would queue it again at once, without a checkpoint.
    """
    for each in (*WARNINGS, signal.SIGCONT):
        signal.signal(each, signal.SIG_DFL)
    try:
        with stop_signals(_stopped):
            outcome = run_logged(job)
    except Interrupted as stop:  # before the run began, or after it ended
        finished = RunFolder(job.folder).exists and RunFolder(job.folder).status == "finished"
        status = "finished" if finished else "interrupted"
        outcome = Outcome(job.name, status, signum=stop.signum)
    # What a queue sends to all processes of a job that it ends would end scontrol, too.
    for each in (*WARNINGS, signal.SIGTERM, signal.SIGCONT, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    return outcome


def _stopped(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _again_here() -> int:
    from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

    return int(LOCAL_REQUEUE_RETURN_CODE)


def _starts_file(folder: Path, queue: str) -> Path:
    return folder / f"{queue}_starts.json"


def _starts(folder: Path, queue: str) -> list[int]:
    """From what frames each start of a job went on."""
    try:
        return [int(each) for each in json.loads(_starts_file(folder, queue).read_text("utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _note_start(folder: Path, queue: str, frames: int) -> None:
    replace_file(_starts_file(folder, queue), json.dumps([*_starts(folder, queue), frames]))


def idle(folder: Path, queue: str, job: Job, at_limit: bool) -> str | None:
    """Why a job that was stopped is not to be started again; None: it is.

    Args:
        folder: of submitit's files.
        queue: the job's id.
        job: the job.
        at_limit: by its time limit: another start would end as this one did.
    """
    starts = _starts(folder, queue)
    if at_limit and in_vain(job, starts):
        return (
            f"its time limit came before a checkpoint beyond {done(job)}; give a larger "
            "launcher.timeout_min"
        )
    return stuck(job, starts)
