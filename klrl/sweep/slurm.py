"""SLURM's commands, and what they tell. Nothing is asked of its accounting, which may be off."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

#: Seconds for one command; a busy controller takes many.
_TIMEOUT = 60
#: What sbatch allows where SLURM does not tell: its own default.
_MAX_ARRAY = 1001
#: States of a job that SLURM ended although it could go on.
CUT_SHORT = frozenset({"TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})


def here() -> bool:
    """Whether this machine sends jobs to a SLURM."""
    return all(shutil.which(command) for command in ("sbatch", "srun", "squeue"))


def in_queue(submissions: Path) -> dict[str, str] | None:
    """The jobs in the queue whose batch file lies below a folder, by id: ``{"12_3": "RUNNING"}``.

    None where SLURM does not answer.
    """
    user = f"--user={getpass.getuser()}"
    # The batch file comes last: it may have any character in it.
    told = _ask("squeue", "--noheader", "--array", user, "--format=%i|%T|%o")
    if told is None:
        return None
    jobs = [line.split("|", 2) for line in told.splitlines() if line.count("|") >= 2]
    files = {file.strip() for *_, file in jobs}
    own = {file for file in files if Path(file).resolve().is_relative_to(submissions.resolve())}
    return {job.strip(): state.strip() for job, state, file in jobs if file.strip() in own}


def _about(job: str) -> dict[str, str]:
    """What SLURM tells of a job that is in the queue or left it lately; empty where it does not."""
    told = _ask("scontrol", "--oneliner", "show", "job", job) or ""
    return dict(re.findall(r"(?:^|\s)([A-Za-z:]+)=(\S*)", told))


def state_of(job: str) -> str | None:
    """The state of a job, as ``COMPLETED``; None where SLURM has forgotten it."""
    return _about(job).get("JobState")


def max_array_size() -> int:
    """How many jobs one array may have, at least 1."""
    told = _ask("scontrol", "show", "config") or ""
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(int(size[1]) if size else _MAX_ARRAY, 1)


def requeue(job: str) -> str | None:
    """Put a job back into the queue, where it keeps its id; returns why SLURM refuses, if so."""
    try:
        _run("scontrol", "requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(getattr(error, "stderr", None) or error).split())
    return None


def cancel(jobs: Iterable[str], *flags: str) -> None:
    """Take jobs out of the queue, those that run too."""
    jobs = list(jobs)
    for start in range(0, len(jobs), 500):  # a command line has an end
        _ask("scancel", "--quiet", *flags, *jobs[start : start + 500])


def interrupt(jobs: Iterable[str]) -> None:
    """Ask running jobs to stop in good order, as Ctrl-C does."""
    cancel(jobs, "--signal=INT")


def why_stopped(job: str, restarts: str) -> str:
    """Why SLURM told a job to stop, whose process has this SLURM_RESTART_COUNT.

    ``warned``: it is still the job's turn, or its time is over; it may queue itself again.
    ``requeued``: SLURM did that already. ``cancelled``: by a person.
    """
    told = _about(job)
    if told.get("JobState") in ("RUNNING", "SUSPENDED", None):
        return "warned"
    if told.get("Restarts", restarts) != restarts:
        return "requeued"
    over = told.get("Reason") == "TimeLimit" or told["JobState"] in CUT_SHORT
    # While a job is being ended, its state says no more than that.
    return "warned" if over or told.get("PreemptTime", "None") != "None" else "cancelled"


def refusal(error: BaseException) -> str:
    """What sbatch said, in one line."""
    lines = [line for line in str(error).splitlines() if not line.startswith("Try ")]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines]
    return "; ".join(dict.fromkeys(filter(None, map(str.strip, said)))) or type(error).__name__


def _ask(*command: str) -> str | None:
    """What a command prints; None where it fails."""
    try:
        return _run(*command)
    except (OSError, subprocess.SubprocessError):
        return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    return done.stdout
